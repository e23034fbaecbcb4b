//! A GGUF file; the first byte chooses what it is written as.
#![no_main]

#[path = "../../crates/checkpoints/tests/checkpoints/counting.rs"]
mod counting;
#[path = "../../crates/checkpoints/tests/checkpoints/drive.rs"]
mod drive;
mod place;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

static PLACE: LazyLock<PathBuf> = LazyLock::new(place::place);

fuzz_target!(|data: &[u8]| {
    let Some((&choice, data)) = data.split_first() else { return };
    let file = PLACE.join("in").join("x.gguf");
    fs::write(&file, data).expect("written");
    if let Ok(done) = drive::exercise(&file, None, &PLACE.join("out"), choice.into()) {
        assert_eq!(done.written + done.refused, 3, "each is written in three ways");
    }
});
