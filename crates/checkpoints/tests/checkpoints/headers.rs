//! Headers of tens of MB: the memory of opening is proportional to their length, whether they are
//! read or refused.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{Checkpoint, CheckpointError, Metadata, TensorProblem};

use super::counting::peak;
use super::drive::{SLACK, size};
use super::folder;

/// The most bytes of memory for a byte of a header, which short texts in `__metadata__` take.
const FACTOR: usize = 16;

/// Opens a checkpoint, in bounded memory.
fn open(what: &str, path: &Path) -> Result<Checkpoint, CheckpointError> {
    let (result, bytes) = peak(|| Checkpoint::open(path));
    let files = size(path);
    println!("{what}: {bytes} bytes for {files} of files");
    assert!(bytes <= FACTOR * files + SLACK, "{what}: {bytes} bytes for {files} of files");
    result
}

/// The text of an object of `count` fields.
fn object(count: usize, field: impl Fn(&mut String, usize)) -> String {
    let mut text = "{".to_owned();
    for at in 0..count {
        text.push_str(if at == 0 { "" } else { "," });
        field(&mut text, at);
    }
    text + "}"
}

/// A file of a header, with `data` bytes of data.
fn write(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(path, bytes).expect("written");
}

const EMPTY: &str = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;

#[test]
#[ignore = "slow"]
fn headers_of_many_tensors_are_read() {
    let path = folder("headers-tensors").join("x.safetensors");
    let axes = format!("[{}0]", "0,".repeat(63));
    let long = "long.".repeat(200);
    let check = |what: &str, header: &str, data: usize, names: [&str; 2], shape: &[usize]| {
        write(&path, header, data);
        assert!(header.len() > 20_000_000, "{what}: the premise, {} bytes", header.len());
        let checkpoint = open(what, &path).expect(what);
        for name in names {
            let tensor = checkpoint.container().get(name).expect(name);
            assert_eq!((&*tensor.name, &*tensor.shape), (name, shape), "{what}");
        }
        checkpoint.container().len()
    };

    let header = object(400_000, |text, at| _ = write!(text, "\"{at:x}\":{EMPTY}"));
    assert_eq!(check("short names", &header, 0, ["0", "61a7f"], &[0]), 400_000);

    // serde reads a structure from a list, too: nothing that says a tensor is shorter.
    let list = r#"["U8",[0],[0,0]]"#;
    let header = object(900_000, |text, at| _ = write!(text, "\"{at:x}\":{list}"));
    assert_eq!(check("lists", &header, 0, ["0", "dbb9f"], &[0]), 900_000);

    let header = object(25_000, |text, at| _ = write!(text, "\"{long}{at:x}\":{EMPTY}"));
    let (first, last) = (format!("{long}0"), format!("{long}61a7"));
    assert_eq!(check("long names", &header, 0, [&*first, &*last], &[0]), 25_000);

    let header = object(350_000, |text, at| _ = write!(text, "\"\\u0061\\n{at:x}\":{EMPTY}"));
    assert_eq!(check("names with escapes", &header, 0, ["a\n0", "a\n5572f"], &[0]), 350_000);

    let header = object(120_000, |text, at| {
        let entry = format!(r#"{{"dtype":"U8","shape":{axes},"data_offsets":[0,0]}}"#);
        _ = write!(text, "\"{at:x}\":{entry}");
    });
    assert_eq!(check("many axes", &header, 0, ["0", "1d4bf"], &[0; 64]), 120_000);

    let header = object(400_000, |text, at| {
        let offsets = format!("[{at},{}]", at + 1);
        _ = write!(text, r#""{at:x}":{{"dtype":"U8","shape":[],"data_offsets":{offsets}}}"#);
    });
    assert_eq!(check("bytes", &header, 400_000, ["0", "61a7f"], &[]), 400_000);
}

#[test]
fn a_name_that_is_there_twice_is_found_among_many() {
    let path = folder("headers-twice").join("x.safetensors");
    let header = object(400_000, |text, at| {
        // The last again.
        let name = if at == 1234 { 399_999 } else { at };
        _ = write!(text, "\"{name:x}\":{EMPTY}");
    });
    write(&path, &header, 0);
    match open("twice", &path) {
        Err(CheckpointError::Tensor { tensor, problem: TensorProblem::Duplicate, .. }) => {
            assert_eq!(tensor, "61a7f");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "slow"]
fn metadata_of_many_megabytes_is_read() {
    let path = folder("headers-metadata").join("x.safetensors");
    let check = |what: &str, metadata: &str, expected: [(&str, &str); 2]| {
        write(&path, &format!(r#"{{"x":{EMPTY},"__metadata__":{metadata}}}"#), 0);
        let checkpoint = open(what, &path).expect(what);
        assert!(checkpoint.container().get("x").is_some());
        let Some(Metadata::Safetensors(metadata)) = checkpoint.container().metadata() else {
            panic!("a safetensors file");
        };
        for (key, text) in expected {
            assert!(metadata.get(key) == Some(text), "{what}: the text of {key}");
        }
        assert_eq!(metadata.iter().next().map(|(key, _)| key), Some(expected[0].0));
        metadata.iter().count()
    };

    let metadata = object(2_000_000, |text, at| _ = write!(text, "\"{at:x}\":\"\""));
    assert_eq!(check("short texts", &metadata, [("0", ""), ("1e847f", "")]), 2_000_000);

    // As JSON in JSON is written.
    let (said, written) =
        (r#"{"format": "Zoë 😀"},"#, r#"{\"format\": \"Zo\u00eb \ud83d\ude00\"},"#);
    let (said, written) = (said.repeat(500_000), written.repeat(500_000));
    let metadata = object(2, |text, at| _ = write!(text, "\"{at}\":\"{written}\""));
    assert_eq!(check("long texts", &metadata, [("0", &*said), ("1", &*said)]), 2);
}

#[test]
fn metadata_that_is_not_text_is_refused() {
    let path = folder("headers-texts").join("x.safetensors");
    let long = "\\n".repeat(2_000_000);
    for wrong in ["7", r#""\ud83d""#] {
        let header = format!(r#"{{"__metadata__":{{"a":"{long}","b":{wrong}}}}}"#);
        write(&path, &header, 0);
        let error = open("wrong text", &path).expect_err("refused").to_string();
        assert!(error.contains("`__metadata__`: "), "{error}");
    }
}

#[test]
#[ignore = "slow"]
fn an_index_of_many_tensors_gives_their_order() {
    const TENSORS: usize = 300_000;
    let folder = folder("headers-index");
    let shard = |at: usize| format!("{}.safetensors", ["a", "b", ""][at % 3]);
    for place in 0..3 {
        let own = |at: usize| 3 * at + place;
        let header = object(TENSORS / 3, |text, at| _ = write!(text, "\"{:x}\":{EMPTY}", own(at)));
        write(&folder.join(shard(place)), &header, 0);
    }
    let index = object(TENSORS, |text, at| {
        let last = TENSORS - 1 - at;
        _ = write!(text, "\"{last:x}\":\"{}\"", shard(last));
    });
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, format!(r#"{{"metadata":{{}},"weight_map":{index}}}"#)).expect("written");
    let checkpoint = open("index", &folder).expect("shards");
    let names = checkpoint.container().tensors().map(|tensor| tensor.name.into_owned());
    assert!(names.eq((0..TENSORS).rev().map(|at| format!("{at:x}"))), "the order of the index");
    assert!(checkpoint.container().get("493df").is_some());

    // As many shards as tensors, and none of them there.
    let index = object(1_000_000, |text, at| _ = write!(text, "\"{at:x}\":\"{at}.safetensors\""));
    fs::write(&path, format!(r#"{{"weight_map":{index}}}"#)).expect("written");
    match open("an index alone", &folder) {
        Err(CheckpointError::TensorIo { tensor, .. }) => assert_eq!(tensor, "0"),
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "slow"]
fn gguf_headers_of_many_tensors_are_read() {
    const PAIRS: u64 = 500_000;
    const TENSORS: u64 = 500_000;
    let path = folder("headers-gguf").join("x.gguf");
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(TENSORS.to_le_bytes());
    bytes.extend((PAIRS + 1).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8_u32.to_le_bytes());
    text(&mut bytes, &"toy".repeat(5_000_000));
    for at in 0..PAIRS {
        text(&mut bytes, &format!("{at:x}"));
        bytes.extend(0_u32.to_le_bytes());
        bytes.push(1);
    }
    for at in 0..TENSORS {
        text(&mut bytes, &format!("{at:x}"));
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
    }
    fs::write(&path, &bytes).expect("written");
    let checkpoint = open("GGUF", &path).expect("a file");
    assert_eq!(checkpoint.container().len(), TENSORS as usize);
    assert_eq!(checkpoint.container().get("7a11f").expect("the last").shape[..], [0]);
    let Some(Metadata::Gguf(metadata)) = checkpoint.container().metadata() else {
        panic!("a GGUF file");
    };
    assert_eq!(metadata.architecture().map(str::len), Some(15_000_000));
}

#[test]
fn deep_nesting_is_refused() {
    let path = folder("headers-deep").join("x.safetensors");
    write(&path, &format!(r#"{{"x":{{"y":{}"#, "[".repeat(30_000_000)), 0);
    let error = open("deep", &path).expect_err("refused").to_string();
    assert!(error.contains("tensor `x`"), "{error}");
}
