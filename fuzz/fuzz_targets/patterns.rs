//! A pattern of module names in every syntax: what is written means the same where it is read.
#![no_main]

use burn_fp4_checkpoints::{Pattern, Syntax};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|texts: (&str, &str)| {
    let (text, name) = texts;
    for syntax in [Syntax::Glob, Syntax::Regex, Syntax::Both, Syntax::Names, Syntax::Unmarked] {
        let pattern = Pattern::parse(text, syntax);
        let Ok(matcher) = pattern.matcher() else { continue };
        let matches = matcher.matches(name);
        for other in [Syntax::Regex, Syntax::Both, Syntax::Names] {
            let Some(written) = pattern.write(other) else { continue };
            let read = Pattern::parse(&written, other).matcher().expect("a pattern");
            assert_eq!(read.matches(name), matches, "{text} as {written} for {name}");
        }
    }
});
