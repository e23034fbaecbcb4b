//! [`Pattern`]: a pattern of module names as each producer writes it, and the same pattern in
//! another's words. [`Patterns`]: a list of them, ready to match weights.
//!
//! | syntax | example | matches | who |
//! |---|---|---|---|
//! | exact | `lm_head` | the module | all |
//! | prefix star | `model.layers.1*` | names that start so; the star crosses dots, | ModelOpt |
//! |  |  | so `model.layers.10` too |  |
//! | glob (`fnmatch`) | `*.mlp.gate` | `*` any text, `?` one character, `[ab]` a or b | ModelOpt |
//! | regular expression | `re:.*gate$` | names, from their start on | compressed-tensors, Quark |
//! | container | `model.layers.0.` | the modules within | miles |
//! | components | `**.output.*` | `**.` any number of components, also none | recipes |
//! | unmarked | `model.layers.*.mlp` | a regular expression, from the start on | transformers |
//!
//! Sources: `convert_hf_config.py` of ModelOpt, `utils/match.py` of compressed-tensors
//! (`re.match`), `tools/convert_hf_to_nvfp4.py` of miles, `should_convert_module` of transformers.

use std::collections::{HashMap, HashSet};
use std::fmt;

use regex::{Regex, RegexBuilder};

use crate::error::PolicyError;
use crate::nearest::nearest;

/// Most bytes of a compiled expression, of which a file may have many: names of modules take a
/// few thousand, `a{9999}` some million.
const MOST: usize = 1 << 20;

/// Characters that make a text without a mark a regular expression: names have none of them.
const OPERATORS: [char; 10] = ['*', '+', '?', '\\', '[', '(', '{', '|', '$', '^'];

/// Characters that make a text a glob.
const WILD: [char; 3] = ['*', '?', '['];

/// Any number of components between two dots.
const COMPONENTS: &str = ".**.";

/// A pattern of module names.
///
/// ```
/// use burn_fp4_policy::{Pattern, Syntax};
///
/// let pattern = Pattern::parse("model.layers.1*", Syntax::Glob);
/// let matcher = pattern.matcher()?;
/// assert!(matcher.matches("model.layers.10.mlp") && !matcher.matches("model.layers.2"));
/// assert_eq!(pattern.write(Syntax::Regex).as_deref(), Some(r"re:model\.layers\.1.*"));
/// # Ok::<(), burn_fp4_policy::PolicyError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pattern {
    /// The module of this name.
    Exact(String),
    /// Modules whose name starts so, whatever follows.
    PrefixStar(String),
    /// `fnmatch`: `*`, `?`, `[...]`.
    Glob(String),
    /// A regular expression that is matched from the start of the name on.
    Regex(String),
    /// The modules within the one of this name.
    Within(String),
}

/// The syntax in which a producer writes patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// Exact names, prefix stars and globs: ModelOpt.
    Glob,
    /// Exact names and `re:`: compressed-tensors.
    Regex,
    /// Exact names, `re:` and globs: Quark.
    Both,
    /// The same, and `**.` for any number of components: [recipes](crate#patterns).
    Recipe,
    /// Exact names, and containers by a dot at the end: miles.
    Names,
    /// Regular expressions without a mark, which names without operators are too: transformers'
    /// `modules_to_not_convert`.
    Unmarked,
}

impl Pattern {
    /// Reads a producer's text.
    #[must_use]
    pub fn parse(text: &str, syntax: Syntax) -> Self {
        let owned = text.to_owned();
        match (text.strip_prefix("re:"), syntax) {
            (None, Syntax::Unmarked) if text.contains(OPERATORS) => return Self::Regex(owned),
            (_, Syntax::Unmarked) => return Self::PrefixStar(owned),
            (Some(regex), Syntax::Regex | Syntax::Both | Syntax::Recipe | Syntax::Names) => {
                return Self::Regex(regex.to_owned());
            }
            (Some(_), Syntax::Glob) | (None, Syntax::Regex) => return Self::Exact(owned),
            // The names within modules that wild cards choose.
            (None, Syntax::Recipe) if text.ends_with('.') && text.contains(WILD) => {
                return Self::parse(&format!("{text}*"), syntax);
            }
            (None, Syntax::Recipe) if format!(".{text}").contains(COMPONENTS) => {
                return Self::Regex(format!("{}$", regex_of_components(text)));
            }
            (None, Syntax::Glob | Syntax::Both | Syntax::Recipe | Syntax::Names) => {}
        }
        if let Some(container) = text.strip_suffix('.') {
            return Self::Within(container.to_owned());
        }
        match text.strip_suffix('*') {
            Some(prefix) if !prefix.contains(WILD) => Self::PrefixStar(prefix.to_owned()),
            _ if text.contains(WILD) => Self::Glob(owned),
            _ => Self::Exact(owned),
        }
    }

    /// The pattern as a producer writes it, if it can.
    #[must_use]
    pub fn write(&self, syntax: Syntax) -> Option<String> {
        let text = match (self, syntax) {
            (Self::Exact(name) | Self::PrefixStar(name), Syntax::Unmarked)
                if !name.contains(OPERATORS) =>
            {
                return Some(name.clone());
            }
            (_, Syntax::Unmarked) => return Some(self.regex()),
            (Self::Regex(regex), Syntax::Glob) => star_of(regex),
            (Self::Regex(regex), Syntax::Regex | Syntax::Both | Syntax::Recipe | Syntax::Names) => {
                return Some(format!("re:{regex}"));
            }
            (Self::Exact(name), _) => Some(name.clone()),
            (Self::PrefixStar(prefix), Syntax::Glob | Syntax::Both | Syntax::Recipe) => {
                Some(format!("{prefix}*"))
            }
            (Self::Within(name), Syntax::Glob | Syntax::Both | Syntax::Recipe) => {
                Some(format!("{name}.*"))
            }
            (Self::Within(name), Syntax::Names) => Some(format!("{name}.")),
            (Self::Glob(glob), Syntax::Glob | Syntax::Both | Syntax::Recipe) => Some(glob.clone()),
            (_, Syntax::Regex | Syntax::Names) => None,
        };
        // A name may have characters that are operators there: `a*` of compressed-tensors.
        let reads = |text: &String| syntax != Syntax::Recipe || malformed(text).is_none();
        match text.filter(|text| reads(text) && self.is_same(&Self::parse(text, syntax))) {
            None if syntax != Syntax::Glob => Some(format!("re:{}", self.regex())),
            text => text,
        }
    }

    /// Returns true if a pattern that was read again is this one.
    fn is_same(&self, read: &Self) -> bool {
        match (self, read) {
            (Self::Within(name), Self::PrefixStar(prefix)) => {
                prefix.strip_suffix('.') == Some(name.as_str())
            }
            // `star_of` says it in other words.
            (Self::Regex(_), read) => !matches!(read, Self::Within(_) | Self::Regex(_)),
            _ => self == read,
        }
    }

    /// The regular expression of the pattern, to be matched from the start of a name on.
    fn regex(&self) -> String {
        match self {
            Self::Exact(name) => format!("{}$", regex::escape(name)),
            Self::PrefixStar(prefix) => format!("{}.*", regex::escape(prefix)),
            Self::Within(name) => format!("{}\\..*", regex::escape(name)),
            Self::Glob(glob) => format!("{}$", regex_of_glob(glob)),
            Self::Regex(regex) => regex.clone(),
        }
    }

    /// Makes it ready to match names.
    ///
    /// # Errors
    /// A regular expression that is none, or asks for what finite automata cannot do (look-around,
    /// back references).
    pub fn matcher(&self) -> Result<Matcher, PolicyError> {
        self.matcher_of(&self.to_string())
    }

    /// Makes it ready to match names; `text` is the pattern as errors show it.
    pub(crate) fn matcher_of(&self, text: &str) -> Result<Matcher, PolicyError> {
        match self {
            Self::Exact(name) => Ok(Matcher(MatcherKind::Exact(name.clone()))),
            Self::PrefixStar(prefix) => Ok(Matcher(MatcherKind::Prefix(prefix.clone()))),
            Self::Within(name) => Ok(Matcher(MatcherKind::Prefix(format!("{name}.")))),
            Self::Glob(_) | Self::Regex(_) => {
                let regex = RegexBuilder::new(&format!("^(?s:{})", self.regex()))
                    .size_limit(MOST)
                    .dfa_size_limit(MOST)
                    .build();
                regex.map(|regex| Matcher(MatcherKind::Regex(regex))).map_err(|source| {
                    PolicyError::Pattern { pattern: text.to_owned(), source: Box::new(source) }
                })
            }
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::PrefixStar(prefix) => write!(f, "{prefix}*"),
            Self::Within(name) => write!(f, "{name}."),
            Self::Glob(glob) => f.write_str(glob),
            Self::Regex(regex) => write!(f, "re:{regex}"),
        }
    }
}

/// A [`Pattern`] that is ready to match names.
#[derive(Debug)]
pub struct Matcher(MatcherKind);

#[derive(Debug)]
enum MatcherKind {
    Exact(String),
    Prefix(String),
    Regex(Regex),
}

impl Matcher {
    /// Returns true if the pattern matches a name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        match &self.0 {
            MatcherKind::Exact(exact) => exact == name,
            MatcherKind::Prefix(prefix) => name.starts_with(prefix.as_str()),
            MatcherKind::Regex(regex) => regex.is_match(name),
        }
    }
}

/// Finds characters in a pattern of a recipe that look like operators and are none, which names of
/// weights do not have, and patterns without any character.
pub(crate) fn malformed(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("it is empty and matches nothing; write a name, or remove it");
    }
    if text.starts_with("re:") {
        return None;
    }
    if text.contains(['{', '}']) {
        return Some(
            "braces have no meaning; write a pattern for each name, or a regular expression such \
             as `re:.*\\.(k|v)_proj$`",
        );
    }
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('[') {
        let Some((_, behind)) = character_class(after) else {
            return Some("`[` is not closed; write `[kv]` for one of two characters");
        };
        rest = behind;
    }
    None
}

/// The prefix star of a regular expression that is a literal and `.*`.
fn star_of(regex: &str) -> Option<String> {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let body = regex.strip_suffix('$').unwrap_or(regex);
    let (leading, body) = match body.strip_prefix(".*") {
        Some(body) => ("*", body),
        None => ("", body),
    };
    let (body, trailing) = match body.strip_suffix(".*") {
        Some(body) => (body, "*"),
        // Without an end the expression matches whatever follows.
        None if !regex.ends_with('$') => (body, "*"),
        None => (body, ""),
    };
    let mut literal = String::new();
    let mut chars = body.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' => match chars.next()? {
                '*' | '?' | '[' => return None,
                escaped if escaped.is_ascii_punctuation() => literal.push(escaped),
                _ => return None,
            },
            '.' if chars.as_str().starts_with('*') => {
                chars.next();
                literal.push('*');
            }
            // Unescaped it matches any character; a glob has `?` for that.
            '.' => literal.push('?'),
            other if other.is_alphanumeric() || other == '_' || other == '-' => literal.push(other),
            _ => return None,
        }
    }
    Some(format!("{leading}{literal}{trailing}"))
}

/// The expression of a glob in which `**.` is any number of components.
fn regex_of_components(glob: &str) -> String {
    let mut glob = format!(".{glob}");
    while glob.contains(".**.**.") {
        glob = glob.replace(".**.**.", COMPONENTS);
    }
    let parts: Vec<_> = glob.split(COMPONENTS).map(regex_of_glob).collect();
    // The dot before the name is not part of it.
    let regex = parts.join("\\.(?:.*\\.)?");
    regex["\\.".len()..].to_owned()
}

/// `fnmatch.translate` of Python.
fn regex_of_glob(glob: &str) -> String {
    let mut regex = String::new();
    let mut rest = glob;
    while let Some(char) = rest.chars().next() {
        rest = &rest[char.len_utf8()..];
        match char {
            '*' => regex.push_str(".*"),
            '?' => regex.push('.'),
            '[' => match character_class(rest) {
                Some((class, after)) => {
                    regex.push_str(&class);
                    rest = after;
                }
                None => regex.push_str("\\["),
            },
            other => regex.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
    regex
}

/// The class of `abc]...` or `!abc]...`, and what follows.
fn character_class(rest: &str) -> Option<(String, &str)> {
    let (negated, body) = match rest.strip_prefix('!') {
        Some(body) => (true, body),
        None => (false, rest),
    };
    // A bracket that closes at once is a character of the class.
    let first = body.chars().next()?.len_utf8();
    let end = first + body[first..].find(']')?;
    let mut class = String::from(if negated { "[^" } else { "[" });
    for char in body[..end].chars() {
        if matches!(char, '\\' | '[' | ']' | '^' | '&' | '~') {
            class.push('\\');
        }
        class.push(char);
    }
    class.push(']');
    Some((class, &body[end + 1..]))
}

/// A list of patterns, ready to match the names of weights and of their modules.
///
/// Exact names are looked up: a recipe of what was done to a model has one for every weight.
///
/// ```
/// use burn_fp4_policy::Patterns;
///
/// let texts = ["lm_head".to_owned(), "*.o_proj".to_owned()];
/// let patterns = Patterns::new(&texts)?;
/// let weight = ["layers.0.o_proj.weight", "layers.0.o_proj"];
/// assert_eq!(patterns.first(weight), Some("*.o_proj"));
/// let unused = patterns.check_used("`keep`", [weight].into_iter()).expect_err("no `lm_head`");
/// assert!(unused.to_string().starts_with("`keep` pattern `lm_head` matches none of 1 tensor"));
/// # Ok::<(), burn_fp4_policy::PolicyError>(())
/// ```
#[derive(Debug)]
pub struct Patterns<'t> {
    texts: Vec<&'t str>,
    exact: HashMap<String, Vec<usize>>,
    others: Vec<(usize, Matcher)>,
}

impl<'t> Patterns<'t> {
    /// Reads patterns in the [syntax of recipes](crate#patterns).
    ///
    /// # Errors
    /// [`PolicyError::Malformed`] for braces and brackets that are not closed, and
    /// [`PolicyError::Pattern`] for a regular expression that is none.
    pub fn new(texts: impl IntoIterator<Item = &'t String>) -> Result<Self, PolicyError> {
        let texts: Vec<&str> = texts.into_iter().map(String::as_str).collect();
        let mut exact: HashMap<String, Vec<usize>> = HashMap::new();
        let mut others = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            if let Some(problem) = malformed(text) {
                return Err(PolicyError::Malformed { pattern: (*text).to_owned(), problem });
            }
            match Pattern::parse(text, Syntax::Recipe) {
                Pattern::Exact(text) => exact.entry(text).or_default().push(at),
                pattern => others.push((at, pattern.matcher_of(text)?)),
            }
        }
        Ok(Self { texts, exact, others })
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Returns the text of a pattern.
    pub(crate) fn text(&self, at: usize) -> &'t str {
        self.texts[at]
    }

    /// Returns the numbers of the patterns that match one of these names, in no order.
    pub fn matches(&self, names: [&str; 2]) -> impl Iterator<Item = usize> {
        let same = names.into_iter().filter_map(|name| self.exact.get(name)).flatten().copied();
        let alike =
            move |(_, matcher): &&(usize, Matcher)| names.iter().any(|n| matcher.matches(n));
        same.chain(self.others.iter().filter(alike).map(|(at, _)| *at))
    }

    /// Returns the first pattern that matches one of these names.
    #[must_use]
    pub fn first(&self, names: [&str; 2]) -> Option<&'t str> {
        self.matches(names).min().map(|at| self.texts[at])
    }

    /// Finds the first pattern that matches nothing, which is a mistake.
    ///
    /// # Errors
    /// [`PolicyError::NoMatch`] with the list that the pattern is of.
    pub fn check_used<'n>(
        &self,
        list: &'static str,
        names: impl Iterator<Item = [&'n str; 2]> + Clone,
    ) -> Result<(), PolicyError> {
        match self.unused(names.clone()).first() {
            None => Ok(()),
            Some(&at) => Err(no_match(list, self.texts[at], names)),
        }
    }

    /// Returns the numbers of the patterns that match nothing.
    #[must_use]
    pub fn unused<'n>(&self, names: impl Iterator<Item = [&'n str; 2]> + Clone) -> Vec<usize> {
        let mut unused: Vec<usize> = Vec::new();
        for (at, matcher) in &self.others {
            let misses = |names: [&str; 2]| !names.iter().any(|name| matcher.matches(name));
            unused.extend(names.clone().all(misses).then_some(*at));
        }
        if !self.exact.is_empty() {
            let mut open: HashSet<&str> = self.exact.keys().map(String::as_str).collect();
            for name in names.flatten() {
                open.remove(name);
            }
            unused.extend(open.into_iter().flat_map(|text| &self.exact[text]));
        }
        unused.sort_unstable();
        unused
    }
}

/// Finds the pattern that a user may have meant by one that matches no weight. Each weight has its
/// name and that of its module.
///
/// ```
/// let names = [["mlp.up_proj.weight", "mlp.up_proj"], ["lm_head.weight", "lm_head"]];
/// let found = burn_fp4_policy::nearest_pattern("*.up_prj", names.into_iter());
/// assert_eq!(found.as_deref(), Some("*.up_proj"));
/// ```
#[must_use]
pub fn nearest_pattern<'n>(
    pattern: &str,
    weights: impl Iterator<Item = [&'n str; 2]> + Clone,
) -> Option<String> {
    let names: Vec<&str> = weights.clone().map(|[name, _]| name).collect();
    let matches = |found: &str| {
        let matcher = Pattern::parse(found, Syntax::Recipe).matcher();
        let hits = |matcher: Matcher| weights.clone().flatten().any(|name| matcher.matches(name));
        matcher.is_ok_and(hits)
    };
    nearest(&names, pattern, matches)
}

fn no_match<'n>(
    list: &'static str,
    pattern: &str,
    weights: impl Iterator<Item = [&'n str; 2]> + Clone,
) -> PolicyError {
    let nearest = nearest_pattern(pattern, weights.clone());
    let names: Vec<&str> = weights.map(|[name, _]| name).collect();
    let first = names.first().copied().unwrap_or("none").to_owned();
    PolicyError::NoMatch { list, pattern: pattern.to_owned(), tensors: names.len(), first, nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, syntax: Syntax, hits: &[&str], misses: &[&str]) {
        let pattern = Pattern::parse(text, syntax);
        let others = [Syntax::Glob, Syntax::Regex, Syntax::Both, Syntax::Recipe, Syntax::Names];
        let same =
            others.iter().filter_map(|&other| Some(Pattern::parse(&pattern.write(other)?, other)));
        for pattern in [pattern.clone()].into_iter().chain(same) {
            let matcher = pattern.matcher().expect("a pattern");
            for hit in hits {
                assert!(matcher.matches(hit), "{text} as {pattern:?}: {hit}");
            }
            for miss in misses {
                assert!(!matcher.matches(miss), "{text} as {pattern:?}: {miss}");
            }
        }
    }

    #[test]
    fn a_pattern_means_the_same_in_every_syntax() {
        check("lm_head", Syntax::Glob, &["lm_head"], &["lm_heads", "x.lm_head"]);
        check(
            "model.layers.1*",
            Syntax::Glob,
            &["model.layers.1", "model.layers.10.mlp"],
            &["model.layers.2", "modelxlayers.1"],
        );
        check("*.gate", Syntax::Glob, &["a.b.gate"], &["a.gate_proj", "gate"]);
        check("a?[bc]", Syntax::Both, &["axb", "a.c"], &["axd", "axbb"]);
        check("a[!bc]*d", Syntax::Glob, &["axd", "axyd"], &["abd"]);
        check("re:.*mlp.gate$", Syntax::Regex, &["m.mlp.gate"], &["m.mlp.gate_proj"]);
        check("re:vision.*", Syntax::Regex, &["vision_tower.x"], &["a.vision"]);
        check("re:.*(a|b)_proj", Syntax::Regex, &["x.a_proj", "x.b_proj.y"], &["c_proj"]);
        check(
            "model.layers.*.self_attn",
            Syntax::Unmarked,
            &["model.layers.3.self_attn.q_proj"],
            &["model.layers.3.mlp"],
        );
        check(
            "layers.1+.mlp",
            Syntax::Unmarked,
            &["layers.1.mlp", "layers.11.mlp.up_proj"],
            &["layers.2.mlp", "layers.1+.mlp"],
        );
        check("model.layers.0.", Syntax::Names, &["model.layers.0.mlp"], &["model.layers.00"]);
    }

    #[test]
    fn two_stars_and_a_dot_are_any_number_of_components_in_a_recipe_alone() {
        let output = ["output.weight", "a.output.weight", "a.b.output.x.weight"];
        check("**.output.*", Syntax::Recipe, &output, &["output", "a.xoutput.weight"]);
        check("a.**.b", Syntax::Recipe, &["a.b", "a.x.b", "a.x.y.b"], &["a.xb", "xa.b", "a.b.c"]);
        check("**.**.a", Syntax::Recipe, &["a", "x.a", "x.y.a"], &["xa"]);
        check("a.**", Syntax::Recipe, &["a.b", "a.b.c"], &["a", "ab.c"]);
        check("*.a", Syntax::Recipe, &["x.a", "x.y.a"], &["a"]);
        check("**.l.0.", Syntax::Recipe, &["l.0.a", "x.l.0.a.b"], &["l.0", "xl.0.a", "l.00.a"]);
        check("*.l.0.", Syntax::Recipe, &["x.l.0.a", "x.y.l.0.a"], &["l.0.a", "x.l.0"]);
        check("l.[01].", Syntax::Recipe, &["l.0.a", "l.1.a.b"], &["l.2.a", "l.0"]);
        check("**.a", Syntax::Glob, &["x.a"], &["a"]);
    }

    #[test]
    fn names_of_operators_are_no_operators_elsewhere() {
        check("a*", Syntax::Regex, &["a*"], &["ab", "a"]);
        check("re:a.", Syntax::Glob, &["re:a."], &["ab", "re:a", "re:ab"]);
        check("re:a\\*b", Syntax::Regex, &["a*b"], &["axb", "ab"]);
        check("re:a\\.$", Syntax::Regex, &["a."], &["a.b", "a"]);
        check("a[b].", Syntax::Names, &["a[b].c"], &["ab.c"]);
        let odd = Pattern::Exact("a*".to_owned());
        assert_eq!(odd.write(Syntax::Glob), None);
        assert_eq!(odd.write(Syntax::Unmarked).as_deref(), Some("a\\*$"));
    }

    #[test]
    fn names_with_braces_and_open_brackets_are_written_for_recipes_as_expressions() {
        for name in ["a{b}", "a[b"] {
            let text = Pattern::Exact(name.to_owned()).write(Syntax::Recipe).expect("a text");
            assert_eq!(malformed(&text), None, "{text}");
            let matcher = Pattern::parse(&text, Syntax::Recipe).matcher().expect("a pattern");
            assert!(matcher.matches(name) && !matcher.matches("ab"), "{text}");
        }
        assert_eq!(malformed("*.[kv]_proj"), None);
    }

    #[test]
    fn what_a_glob_cannot_say_is_not_written() {
        let regex = Pattern::parse("re:.*(a|b)_proj", Syntax::Regex);
        assert_eq!(regex.write(Syntax::Glob), None);
        assert_eq!(regex.write(Syntax::Both).as_deref(), Some("re:.*(a|b)_proj"));
        let look = Pattern::Regex("(?!a)b".to_owned());
        assert!(matches!(look.matcher(), Err(PolicyError::Pattern { .. })));
    }

    #[test]
    fn an_error_has_the_pattern_as_the_user_wrote_it() {
        for text in ["**.a[9-0]", "a[9-0]", "re:(a"] {
            let error = Patterns::new(&[text.to_owned()]).expect_err("no pattern").to_string();
            assert!(error.starts_with(&format!("pattern `{text}`: ")), "{error}");
        }
    }
}
