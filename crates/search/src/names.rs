//! Rules, searches and methods by the names of their rows, as command lines and reports have them.

use core::fmt;
use core::str::FromStr;

use crate::error::SearchError;
use crate::method::{ChosenBy, Method, ScaleSearch};
use crate::rule::ScaleRule;

impl fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl FromStr for ScaleRule {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::ALL
            .into_iter()
            .find(|rule| rule.row().name == name)
            .ok_or_else(|| SearchError::UnknownRule(name.to_owned()))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl FromStr for Method {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::ALL
            .into_iter()
            .find(|method| method.row().name == name)
            .ok_or_else(|| SearchError::UnknownMethod(name.to_owned()))
    }
}

impl fmt::Display for ScaleSearch {
    /// The name of its [`method`](Self::method).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.method().row().name)
    }
}

impl fmt::Display for ChosenBy {
    /// The name of its [`method`](Self::method).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.method().row().name)
    }
}
