//! A folder: config, index and a safetensors file, one behind the other with the lengths of the
//! first two before them, opened as what they say or as the dialect that the first byte chooses.
#![no_main]

#[path = "../../crates/checkpoints/tests/checkpoints/counting.rs"]
mod counting;
#[path = "../../crates/checkpoints/tests/checkpoints/drive.rs"]
mod drive;
mod place;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use burn_fp4_checkpoints::DIALECTS;
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

static PLACE: LazyLock<PathBuf> = LazyLock::new(place::place);

fuzz_target!(|data: &[u8]| {
    let Some((&[choice, a, b, c, d], rest)) = data.split_first_chunk::<5>() else { return };
    let length = |low, high| usize::from(u16::from_le_bytes([low, high]));
    let (config, rest) = rest.split_at(length(a, b).min(rest.len()));
    let (index, shard) = rest.split_at(length(c, d).min(rest.len()));
    let folder = PLACE.join("in");
    let texts = [("config.json", config), ("model.safetensors.index.json", index)];
    for (name, text) in texts {
        match text.is_empty() {
            true => drop(fs::remove_file(folder.join(name))),
            false => fs::write(folder.join(name), text).expect("written"),
        }
    }
    fs::write(folder.join("model.safetensors"), shard).expect("written");
    let dialect = DIALECTS.get(usize::from(choice % 16)).map(|dialect| dialect.name());
    if let Ok(done) = drive::exercise(&folder, dialect, &PLACE.join("out"), (choice / 16).into()) {
        assert_eq!(done.written + done.refused, 3, "each is written in three ways");
    }
});
