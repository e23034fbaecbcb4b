//! Rules and methods by the names in their rows, for command lines, files and reports.

use core::fmt;
use core::str::FromStr;

use crate::error::SearchError;
use crate::method::Method;
use crate::rule::ScaleRule;

impl fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl FromStr for ScaleRule {
    type Err = SearchError;

    /// Parses a name, or a former one.
    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::ALL
            .into_iter()
            .find(|rule| rule.row().name == name || rule.row().former_name == Some(name))
            .ok_or_else(|| SearchError::UnknownRule(name.to_owned()))
    }
}

impl fmt::Display for Method {
    /// Writes the name of the [`row`](Self::row), and the options that the name does not stand for:
    /// `gptq (damping 0.1)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.row();
        let own = self.options().into_iter().zip(row.method.options());
        let own: Vec<_> = own.filter(|(own, named)| own != named).map(|(own, _)| own).collect();
        match own.is_empty() {
            true => f.pad(row.name),
            false => f.pad(&format!("{} ({})", row.name, own.join(", "))),
        }
    }
}

impl FromStr for Method {
    type Err = SearchError;

    /// Parses a name; options are read from files.
    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::named(name).ok_or_else(|| SearchError::UnknownMethod(name.to_owned()))
    }
}
