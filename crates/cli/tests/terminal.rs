//! The output of every command on a terminal: tables in its width, plurals, colours.

mod model;

use std::fs;
use std::path::Path;

use half::bf16;
use model::{SMALL, Sizes, Tensor, fp4, run, succeeds};
use safetensors::tensor::Dtype;
use tempfile::tempdir;

/// The layers of a usual model, small enough for a test.
const LAYERS: Sizes = Sizes(32, 32, 32);

/// Runs a command as on a terminal of some columns, and returns the printed text.
fn in_columns(folder: &Path, columns: usize, arguments: &str) -> String {
    let output = fp4()
        .current_dir(folder)
        .env("COLUMNS", columns.to_string())
        .args(arguments.split_whitespace())
        .output()
        .expect("it runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The lines of tables: sentences have no wide spaces.
fn table_of(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("  ") || line.contains('─')).collect()
}

/// Writes weights with activations for `fp4 evaluate`.
fn layers(path: &Path, names: &[&str]) {
    let tensor = |(at, name): (usize, String)| {
        let values = model::values(80 * 64, at as u64 + 1);
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { name, dtype: Dtype::F32, shape: vec![80, 64], bytes }
    };
    let kinds =
        |name: &&str| ["weight", "calibration", "evaluation"].map(|kind| format!("{name}.{kind}"));
    let names = names.iter().flat_map(kinds);
    model::write(path, &names.enumerate().map(tensor).collect::<Vec<_>>());
}

#[test]
fn every_table_of_every_command_fits_80_columns_and_rows_can_be_told_apart() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", LAYERS);
    succeeds(path, "quantize model --out out");
    let names = ["model.layers.2.self_attn.q_proj", "model.layers.31.self_attn.q_proj"];
    layers(&path.join("layers.safetensors"), &names);
    let evaluate = "evaluate layers.safetensors --methods sse,coordinate-descent,gptq-original";
    for command in [
        "quantize model --dry-run",
        "inspect model",
        "inspect out",
        "compare model out",
        evaluate,
        "formats",
    ] {
        let all = match command {
            "formats" => String::new(),
            _ => format!("{command} --all"),
        };
        for columns in [80, 60] {
            for command in [command, all.as_str()] {
                let text = in_columns(path, columns, command);
                let rows = table_of(&text);
                assert!(command.is_empty() || rows.len() > 2, "{command}: {text}");
                for row in &rows {
                    let fits = row.chars().count() <= columns || command == "formats";
                    assert!(fits, "{command} in {columns} columns: {row}\n{text}");
                }
                // Lines that go on with a cell may be alike, and those below headers.
                let is_first = |row: &&&str| !row.starts_with([' ', '─']);
                let mut first: Vec<&str> = rows.iter().filter(is_first).copied().collect();
                let count = first.len();
                first.sort_unstable();
                first.dedup();
                assert_eq!(first.len(), count, "{command} in {columns} columns: {text}");
            }
        }
        let rows = table_of(&in_columns(path, 80, command)).len();
        assert!(rows < 30, "{command}: {rows} rows");
        assert!(table_of(&in_columns(path, 80, &all)).len() > rows || command == "formats");
    }
    let text = in_columns(path, 80, "inspect out --all");
    let at = |name: &str| text.find(name).unwrap_or_else(|| panic!("{name}: {text}"));
    assert!(at("layers.2.mlp.up_proj") < at("layers.10.mlp.up_proj"));
}

#[test]
fn tables_fit_40_columns_and_totals_of_scales_are_told_where_columns_are_not() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", LAYERS);
    succeeds(path, "quantize model --out out");
    for command in ["quantize model --dry-run", "inspect out", "compare model out"] {
        for command in [command.to_owned(), format!("{command} --all")] {
            let text = in_columns(path, 40, &command);
            // A long name in a sentence is not broken.
            for row in table_of(&text).iter().filter(|row| row.trim_start().contains("  ")) {
                assert!(row.chars().count() <= 40, "{command}: {row}\n{text}");
            }
        }
    }
    for columns in [40, 60, 80] {
        let of = |command: &str| in_columns(path, columns, command);
        // Formats and errors are there at any width, and names are cut.
        for (command, words) in [
            ("quantize model --dry-run", &["becomes", "nvfp4 16"][..]),
            ("quantize model --dry-run --all", &["becomes", "nvfp4 16"]),
            ("inspect out", &["format", "nvfp4 16"]),
            ("inspect out --all", &["format", "nvfp4 16"]),
            ("compare model out", &["mean", "largest", "error", "nvfp4 16", " %"]),
            ("compare model out --all", &["largest", "error", "nvfp4 16"]),
        ] {
            let text = of(command);
            let rows: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).collect();
            let table = rows.join("\n");
            for word in words {
                assert!(table.contains(word), "{command} in {columns} columns: {word}: {text}");
            }
        }
        let _ = fs::remove_dir_all(path.join("again"));
        let said = of("quantize model --out again");
        assert!(said.contains("mean error ") && said.contains("worst "), "{said}");
        // Names are not broken.
        let fits = |line: &&str| line.chars().count() <= columns || !line.trim().contains(' ');
        assert!(said.lines().all(|line| fits(&line)), "{columns}: {said}");
    }
    let text = in_columns(path, 80, "inspect out").replace("\n  ", " ");
    assert!(text.contains("\ntensor scales ") && text.contains(" saturated, "), "{text}");
}

#[test]
fn weights_beyond_the_tolerance_are_marked() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", LAYERS);
    succeeds(path, "quantize model --out out");
    let (_, report, _) = run(path, "compare model out --json --tolerance 8");
    let report: serde_json::Value = serde_json::from_str(&report).expect("an object");
    let rows = report["weights"].as_array().expect("weights");
    let beyond = |row: &&serde_json::Value| {
        row["relation"] == "different" && row["name"].as_str().expect("a name").contains("o_proj")
    };
    let count = rows.iter().filter(beyond).count();
    assert!(count > 0 && count < 32, "{count}");
    let (_, table, _) = run(path, "compare model out --tolerance 8");
    let row = table.lines().find(|line| line.contains("o_proj")).expect("a row");
    assert!(table.contains("beyond") && row.ends_with(&format!("{count} of 32")), "{table}");
    let (_, table, _) = run(path, "compare model out");
    assert!(!table.lines().next().expect("a header").contains("beyond"), "{table}");
    let (_, table, _) = run(path, "compare model out --tolerance 8 --all");
    assert!(table.lines().any(|line| line.ends_with(" yes")), "{table}");
}

#[test]
fn rows_of_a_pattern_are_one_with_the_mean_and_the_largest_error() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LAYERS);
    let said = succeeds(folder.path(), "quantize model --out out");
    let inspected = succeeds(folder.path(), "inspect out");
    let row = "model.layers.{0..31}.mlp.down_proj     nvfp4 16  32 x [32, 32]";
    assert!(inspected.contains(row), "{inspected}");
    assert!(inspected.contains("33 tensors"), "{inspected}");
    let (_, compared, _) = run(folder.path(), "compare model out");
    let row = "model.layers.{0..31}.mlp.down_proj     32 x [32, 32]  BF16  nvfp4 16  ";
    assert!(compared.contains(row), "{compared}");
    // The mean that `quantize` prints is that of `compare`.
    let mean = |text: &str, word: &str| {
        let (_, rest) = text.split_once(word).unwrap_or_else(|| panic!("{word}: {text}"));
        rest.split(" %").next().expect("a number").to_owned()
    };
    let [ours, theirs] = [mean(&said, "mean error "), mean(&compared, "of quantized weights ")];
    assert_eq!(ours, theirs);
    assert!(
        compared.contains("224 quantized weights: 224 different; 35 other weights: 35 the same\n")
    );
}

#[test]
fn inspection_says_what_is_quantized_in_types_of_ggml() {
    let folder = tempdir().expect("a folder");
    // 20 bytes of 32 numbers.
    let mut random = model::random(3);
    let bytes = (0..32 * 8 * 20).map(|_| ((random() + 0.5) * 64.0) as u8).collect();
    let norm = 1.0_f32.to_le_bytes().repeat(256);
    let tensors = [
        ("blk.0.attn_q.weight".to_owned(), vec![32, 256], 3, bytes),
        ("blk.0.attn_norm.weight".to_owned(), vec![256], 0, norm),
    ];
    model::write_gguf(&folder.path().join("q.gguf"), &tensors);
    let text = succeeds(folder.path(), "inspect q.gguf");
    let line = "gguf: 1 of 2 weights quantized by types of ggml, 6.1 kB, 5.";
    assert!(text.contains(line), "{text}");
    let words: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
    assert!(words.contains(&vec!["Q4_1", "1", "5.1", "kB", "83", "%", "5.00"]), "{text}");
}

#[test]
fn inspection_warns_of_values_that_are_not_finite() {
    let folder = tempdir().expect("a folder");
    let tensor = |(at, broken): (usize, &[f32])| {
        let mut values = model::values(16 * 64, at as u64 + 1);
        values[..broken.len()].copy_from_slice(broken);
        let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
        let name = format!("layers.{at}.o_proj.weight");
        Tensor { name, dtype: Dtype::BF16, shape: vec![16, 64], bytes: bytes.collect() }
    };
    let broken: [&[f32]; 3] = [&[f32::NAN], &[], &[f32::INFINITY, 1.0, f32::NEG_INFINITY]];
    let tensors: Vec<_> = broken.into_iter().enumerate().map(tensor).collect();
    model::write(&folder.path().join("nan.safetensors"), &tensors);
    let text = succeeds(folder.path(), "inspect nan.safetensors");
    let warned: Vec<&str> = text.lines().filter(|line| line.starts_with("warning: ")).collect();
    let warning = |at: usize, count: &str| {
        let name = format!("layers.{at}.o_proj.weight");
        format!(
            "warning: `{name}`: {count}; fix the weight, or pass --keep '{name}' to `fp4 quantize`"
        )
    };
    let expected = [warning(0, "1 NaN or infinite value"), warning(2, "2 NaN or infinite values")];
    assert_eq!(warned, expected);
    // An embedding stays unasked.
    let mut embedding = model::tensor("model.embed_tokens.weight", &[16, 64], 1);
    embedding.bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&folder.path().join("embedding.safetensors"), &[embedding]);
    let text = succeeds(folder.path(), "inspect embedding.safetensors");
    assert!(text.ends_with("`: 1 NaN or infinite value; fix the weight\n"), "{text}");
}

#[test]
fn copies_of_weights_that_are_not_finite_are_warned_of_by_name() {
    let folder = tempdir().expect("a folder");
    let mut tensors = model::tensors(SMALL);
    for (at, bits) in [(0, [0xC0, 0x7F]), (3, [0x80, 0x7F])] {
        tensors[at].bytes[..2].copy_from_slice(&bits);
    }
    model::write(&folder.path().join("nan.safetensors"), &tensors);
    let warned = |command: &str| {
        let (code, _, said) = run(folder.path(), command);
        assert_eq!(code, 0, "{said}");
        let lines = said.lines().filter(|line| line.contains("NaN or infinite"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let warning = |at: usize| {
        let name = &tensors[at].name;
        let what = "1 NaN or infinite value, copied into the result; fix the weight";
        format!("warning: `{name}`: {what}")
    };
    let keep = format!("--keep {}", tensors[3].name);
    let quantize = format!("quantize nan.safetensors --out out {keep}");
    assert_eq!(warned(&quantize), [warning(0), warning(3)]);
    let convert = "convert nan.safetensors --out plain --dialect plain";
    assert_eq!(warned(convert), [warning(0), warning(3)]);
}

#[test]
fn columns_that_a_terminal_has_no_room_for_are_named() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", LAYERS);
    succeeds(path, "quantize model --out out");
    layers(&path.join("layers.safetensors"), &["model.layers.2.self_attn.q_proj"]);
    for (command, left_out) in [
        ("inspect out", "no room for shape, largest scale, tensor scale"),
        ("compare model out", "no room for shape, A, largest difference"),
        ("evaluate layers.safetensors --methods sse,amax", "no room for"),
    ] {
        let text = in_columns(path, 70, command);
        let text = text.replace("\n  ", " ");
        assert!(text.contains(left_out) && text.contains(" columns or --json"), "{text}");
        let wide = in_columns(path, 200, command);
        assert!(!wide.contains("no room for"), "{wide}");
    }
    // No weight is FP4: there are no scales.
    let dense = succeeds(path, "inspect model");
    assert!(!dense.contains("scale") && dense.contains("size"), "{dense}");
}

#[test]
fn plans_conversions_and_comparisons_fold_what_is_kept() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", LAYERS);
    let plan = succeeds(path, "quantize model --dry-run --first-layers-high-precision 4");
    let row = "model.layers.{0..3}.mlp.down_proj";
    let row = plan.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{plan}"));
    assert!(row.contains("4 x [32, 32]") && row.ends_with("a layer in high precision"), "{row}");
    assert!(plan.lines().count() < 30, "{plan}");
    succeeds(path, "quantize model --out out --dialect modelopt");
    let said = succeeds(
        path,
        "convert out --out kept --dialect modelopt --format mxfp4 --keep *.q_proj --keep *.up_proj",
    );
    let notes: Vec<&str> = said.lines().filter(|line| line.contains("kept as nvfp4")).collect();
    let note = "note: 32 x `model.layers.{0..31}.self_attn.k_proj.weight`: kept as nvfp4 16: runs \
                as one with `q_proj`, which stays";
    assert!(notes.len() == 5 && notes.contains(&note), "{said}");
    let mut tensors = model::tensors(LAYERS);
    tensors.retain(|tensor| !tensor.name.contains("o_proj"));
    model::write(&path.join("less.safetensors"), &tensors);
    let (_, said, _) = run(path, "compare model less.safetensors");
    let only = "only in A: 32 x model.layers.{0..31}.self_attn.o_proj.weight\n";
    assert!(said.contains(only) && said.matches("only in A:").count() == 1, "{said}");
    let (_, said, _) = run(path, "compare less.safetensors model --all");
    assert_eq!(said.matches("only in B: model.layers.").count(), 32, "{said}");
}

#[test]
fn sentences_and_helps_fit_80_columns() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for command in [
        "quantize model --dry-run",
        "quantize model --out out",
        "inspect out",
        "compare model out",
        "quantize --help",
        "convert --help",
        "inspect -h",
        "compare --help",
        "evaluate --help",
        "formats --scales",
        "warnings",
        "--help",
    ] {
        let text = in_columns(folder.path(), 80, command);
        assert!(!text.is_empty(), "{command}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{command}: {line}");
        }
    }
}

#[test]
fn mistakes_on_the_command_line_get_tips_that_help() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for (command, says) in [
        ("quantize model out", "tip: to write to 'out', use '--out out'"),
        ("convert model out --dialect plain", "tip: to write to 'out', use '--out out'"),
        ("quantize model --dry-run --device gpu", "tip: NVIDIA GPUs are 'cuda'"),
        ("quantize model --dry-run --device cpu", "tip: the CPU is 'flex', the default"),
        ("compare model model --tolerance -3", "expected a finite number, 0 or more"),
        ("evaluate x --methods gptk", "a similar value exists: 'gptq'"),
        ("evaluate x --plot x.png", "expected a name that ends in .svg"),
        ("compare model model --html x.png", "expected a name that ends in .html or .htm"),
        ("quantize model --out x.safetensors", "pass an --out that does not end in .safetensors"),
    ] {
        let (code, out, error) = run(folder.path(), command);
        assert!(code == 2 && out.is_empty() && error.contains(says), "{command}: {error}");
        assert!(!error.contains("use '-- ") && !error.contains("tip:\n"), "{command}: {error}");
    }
    let (code, _, said) = run(folder.path(), "quantize model --out out --resume");
    assert!(code == 0 && said.contains("note: no earlier run has left weights"), "{said}");
    let (code, plan, _) = run(folder.path(), "formats");
    assert!(code == 0 && plan.contains("block scales up to 1.7e38 (code 0xfe)"), "{plan}");
}

#[test]
fn a_file_without_tensors_has_no_table() {
    let folder = tempdir().expect("a folder");
    model::write(&folder.path().join("empty.safetensors"), &[]);
    let (_, plan, _) = run(folder.path(), "quantize empty.safetensors --dry-run");
    assert!(plan.starts_with("0 of 0 weights quantized") && !plan.contains('%'), "{plan}");
    let text = succeeds(folder.path(), "inspect empty.safetensors");
    assert!(text.starts_with("plain: 0 of 0 weights quantized"), "{text}");
}

#[test]
fn a_dialect_without_tensor_scales_is_said_to_cost_accuracy() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let note = "note: the dialect `mlx` has no tensor scales";
    for (options, noted) in [
        ("--dialect mlx", true),
        ("--dialect mlx --format mxfp4", false),
        ("--dialect modelopt", false),
    ] {
        let (_, _, said) = run(folder.path(), &format!("quantize model --dry-run {options}"));
        assert_eq!(said.contains(note), noted, "{options}: {said}");
    }
}

#[test]
fn the_same_error_of_several_methods_is_told_once() {
    let folder = tempdir().expect("a folder");
    layers(&folder.path().join("layers.safetensors"), &["up"]);
    let (code, table, error) =
        run(folder.path(), "evaluate layers.safetensors --methods gptq,gptq-original --damping=-1");
    assert_eq!(code, 2, "{error}");
    assert_eq!(error.matches("damping is -1").count(), 1, "{error}");
    assert!(error.contains("4 of 4 evaluations failed: "), "{error}");
    assert!(error.contains("gptq-original -1"), "{error}");
    assert!(table.contains("failed") && !table.contains("damping is"), "{table}");
}

#[test]
fn a_page_of_a_comparison_says_a_sentence_and_keeps_to_what_is_quantized() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out");
    run(folder.path(), "compare model out --html page.html");
    let page = fs::read_to_string(folder.path().join("page.html")).expect("a page");
    let title = "<h1>The quantized weights of out differ from model by 8.";
    assert!(page.contains(title) && page.contains("white-space: nowrap"), "{page}");
    let version = format!("<footer>fp4 {}, 20", env!("CARGO_PKG_VERSION"));
    assert!(page.contains(&version) && page.contains("<line "), "{page}");
    let (_, bars) = page.split_once("<h2>Largest errors of quantized weights").expect("bars");
    // Short names leave their room to the bars.
    let (_, begin) = bars.split_once("<rect x=\"").expect("a bar");
    let begin: f64 = begin.split('"').next().and_then(|x| x.parse().ok()).expect("a number");
    assert!((100.0..300.0).contains(&begin), "{begin}");
    let (bars, _) = bars.split_once("<h2>").expect("what follows");
    assert!(bars.contains("q_proj") && !bars.contains("norm") && !bars.contains("lm_head"));
}

#[test]
fn a_plot_has_a_dark_form_and_the_lines_of_its_scale_behind_bars() {
    let folder = tempdir().expect("a folder");
    layers(&folder.path().join("layers.safetensors"), &["l.0.up", "l.1.up"]);
    let command = "evaluate layers.safetensors --methods sse,amax --plot errors.svg";
    succeeds(folder.path(), command);
    let svg = fs::read_to_string(folder.path().join("errors.svg")).expect("a picture");
    for word in ["prefers-color-scheme: dark", "l.{0..1}.up, nvfp4 16", "class=\"bar1\""] {
        assert!(svg.contains(word), "the picture does not say {word}: {svg}");
    }
    assert!(svg.find("<line ") < svg.find("<rect class=\"bar"), "{svg}");
}

#[test]
fn warnings_are_yellow_and_errors_red_on_terminals_only() {
    let folder = tempdir().expect("a folder");
    let values = [f32::NAN; 64].map(f32::to_le_bytes).concat();
    let name = "layers.0.o_proj.weight".to_owned();
    let tensor = Tensor { name, dtype: Dtype::F32, shape: vec![2, 32], bytes: values };
    model::write(&folder.path().join("nan.safetensors"), &[tensor]);
    let of = |command: &str, variables: &[(&str, &str)]| {
        let output = fp4()
            .current_dir(folder.path())
            .args(command.split_whitespace())
            .env_remove("NO_COLOR")
            .envs(variables.iter().copied())
            .output()
            .expect("it runs");
        [output.stdout, output.stderr]
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat()
    };
    let (yellow, red) = ("\u{1b}[1m\u{1b}[33mwarning:", "\u{1b}[1m\u{1b}[31merror:");
    let forced = ("CLICOLOR_FORCE", "1");
    for (command, coloured) in [
        ("inspect nan.safetensors", yellow),
        ("quantize nan.safetensors --dry-run", yellow),
        ("quantize nan.safetensors --out out", red),
        ("convert nan.safetensors --out nan.safetensors --dialect plain", red),
        ("compare nan.safetensors nowhere", red),
        ("evaluate nowhere", red),
        ("inspect nowhere", red),
    ] {
        let text = of(command, &[forced]);
        assert!(text.contains(coloured), "{command}: {text:?}");
        for variables in [&[][..], &[forced, ("NO_COLOR", "1")]] {
            let text = of(command, variables);
            assert!(!text.contains('\u{1b}'), "{command}: {text:?}");
        }
    }
}

/// Runs a command as on a terminal of 40 columns: what it prints on both streams.
fn in_40_columns(folder: &Path, arguments: &str) -> String {
    let output = fp4()
        .current_dir(folder)
        .env("COLUMNS", "40")
        .args(arguments.split_whitespace())
        .output()
        .expect("it runs");
    [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
}

#[test]
fn sentences_helps_and_mistakes_fit_40_columns() {
    let folder = tempdir().expect("a folder");
    let path = folder.path();
    model::model(path, "model", SMALL);
    let mut broken = model::tensors(SMALL);
    broken[0].bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&path.join("nan.safetensors"), &broken);
    for command in [
        "quantize model --dry-run",
        "quantize model --out out --dialect modelopt",
        "quantize nan.safetensors --out nan",
        "quantize model --out out --resume",
        "quantize model --out out2 --method gptq",
        "quantize model --dry-run --keep *.o_porj",
        "inspect out",
        "inspect nan.safetensors",
        "compare model out",
        "convert out --out mlx --dialect mlx",
        "convert out --out mlx --dialect mlx --inexact",
        "convert model --out plain --dialect plain",
        "evaluate model",
        "quantize model out",
        "quantize model --dry-run --device gpu",
        "quantize model --dry-run --methd sse",
        "quantize model",
        "compare model model --tolerance -3",
        "quantize --help",
        "quantize -h",
        "convert --help",
        "inspect --help",
        "compare --help",
        "evaluate --help",
        "formats",
        "warnings",
        "--help",
    ] {
        let text = in_40_columns(path, command);
        assert!(!text.is_empty(), "{command}");
        for line in text.lines() {
            // Words are not broken: names of weights, paths, and some options.
            let words = line.trim_start().split(' ').filter(|word| !word.is_empty());
            let fits = line.chars().count() <= 40 || words.count() == 1;
            assert!(fits, "{command}: {line}\n{text}");
        }
    }
}

#[test]
fn the_second_column_of_a_list_is_below_the_first_in_40_columns() {
    let folder = tempdir().expect("a folder");
    let of = |command: &str| in_40_columns(folder.path(), command);
    let list = of("warnings");
    let says = "\n  hidden-error\n    the mean error of blocks is beyond";
    assert!(
        list.contains(says) && list.contains("\n  all-zero\n    all values are zero\n"),
        "{list}"
    );
    let readers = of("formats");
    let says = "\n  compressed-tensors\n    nvfp4\n      vLLM, SGLang, transformers*\n    mxfp4\n";
    assert!(readers.contains(says), "{readers}");
    let help = of("quantize --help");
    let mut lines = help.lines().skip_while(|line| line.trim() != "four-over-six");
    let [name, what] = [(); 2].map(|()| lines.next().expect("a line"));
    let indent = |line: &str| line.len() - line.trim_start().len();
    assert_eq!(indent(what), indent(name) + 2, "{help}");
    // Lines that go on stay below what they go on with.
    let mut deeper = lines.take_while(|line| indent(line) > indent(name));
    assert!(deeper.all(|line| indent(line) >= indent(what)), "{help}");
}
