//! Relative errors as people read them.

use std::fmt;

/// A relative error in percent.
///
/// Numbers below a thousandth of a percent are shown as powers of ten: rounded they would look like
/// no error at all.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(crate) struct Percent(pub(crate) f64);

impl Percent {
    /// Returns `sqrt(error / energy)` for sums of squares; infinite for errors of zeros.
    pub(crate) fn of([error, energy]: [f64; 2]) -> Self {
        Self(if error == 0.0 { 0.0 } else { 100.0 * (error / energy).sqrt() })
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0 %"),
            percent if percent.is_infinite() => f.write_str("infinite"),
            percent if percent < 1e-3 => write!(f, "{percent:.1e} %"),
            percent if percent < 0.1 => write!(f, "{percent:.4} %"),
            percent => write!(f, "{percent:.2} %"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_never_shown_as_none() {
        for (squares, shown) in [
            ([0.0, 0.0], "0 %"),
            ([1e-80, 4e-80], "50.00 %"),
            ([64e-80, 1e-76], "8.00 %"),
            ([25e80, 1e90], "0.0050 %"),
            ([1e-14, 1.0], "1.0e-5 %"),
            ([1.0, 0.0], "infinite"),
        ] {
            assert_eq!(Percent::of(squares).to_string(), shown);
        }
    }
}
