//! A safetensors file, opened as the dialect that its first byte chooses.
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
    let Some((&choice, data)) = data.split_first() else { return };
    let (dialect, turn) = (usize::from(choice % 16), usize::from(choice / 16));
    let file = PLACE.join("in").join("x.safetensors");
    fs::write(&file, data).expect("written");
    let dialect = DIALECTS.get(dialect).map(|dialect| dialect.name());
    if let Ok(done) = drive::exercise(&file, dialect, &PLACE.join("out"), turn) {
        assert_eq!(done.written + done.refused, 3, "each is written in three ways");
    }
});
