//! [`Method`]: how scales and codes are chosen, with its options, and the table of names.
//!
//! A search of blocks has a file of its name in `reference/` and in `host/`.

use core::fmt;

use burn_fp4_formats::{Fp4Format, Minifloat};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::gptq::Gptq;

/// Chooses scales and codes. The default is that of the command `fp4`.
///
/// Methods are known by the names in [`NAMED`](Self::NAMED), on command lines and in files. With
/// other options than a name stands for, a file has a table: `{ gptq = { damping = 0.1 } }`.
///
/// ```
/// use burn_fp4_search::{Gptq, Method, Needs, Sse};
///
/// assert_eq!("sse-weighted".parse(), Ok(Method::Sse(Sse::Weighted)));
/// let method = Method::Gptq(Gptq { damping: 0.1, ..Gptq::DEFAULT });
/// assert_eq!(method.to_string(), "gptq (damping 0.1)");
/// assert!(method.needs_inputs() && !Method::SSE.needs_inputs());
/// assert_eq!((method.row().name, method.needs()), ("gptq", Needs::Gram));
/// assert_eq!(method.gptq().map(|options| options.damping), Some(0.1));
/// assert!(method.sums_matrices()); // so bits may differ between engines
/// assert!(Method::Hessian.needs_hessians() && Method::SSE.is_blockwise());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(into = "Written")]
pub enum Method {
    /// Takes the scale that the rule computes from the amax of the block.
    Amax,
    /// Tries two scales, with amax on element 6 or on element 4, and takes the one with the smaller
    /// error (Four Over Six, arXiv 2512.02010; TransformerEngine >= 2.17).
    FourOverSix {
        /// Largest block scale of the first candidate.
        range: E4m3Range,
        /// The error that decides.
        error: ErrorMetric,
    },
    /// Takes the scale with the smallest squared error of all scales.
    Sse(Sse),
    /// Takes the scale with the smallest `r^T H r` of all scales, where `r` are the errors of the
    /// nearest codes. Needs [`Importance::Blocks`](crate::Importance), as the next two do.
    Hessian,
    /// Chooses scale and codes together: for every scale, improves codes one at a time while
    /// `r^T H r` falls.
    CoordinateDescent,
    /// Chooses scale and codes with the alternating direction method of multipliers.
    Admm(Admm),
    /// Rounds channels in turn, and propagates each rounding error to the channels that follow.
    Gptq(Gptq),
}

/// The options of [`Method::Sse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sse {
    /// All errors count alike.
    #[default]
    Uniform,
    /// The squared error of a channel is multiplied by its weight: the mean square of its
    /// activations.
    Weighted,
    /// Also tries 16 tensor scales, and takes the one with the smallest total error.
    TensorScale,
}

/// The options of [`Method::Admm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admm {
    /// Starts from the solution of [`Method::CoordinateDescent`] and keeps the best iterate.
    #[default]
    BestIterate,
    /// As qwantize publishes it: starts from the rule's scale and keeps the last iterate, which may
    /// be worse than the first.
    Published,
}

/// Sets the largest block scale, to which the amax of the tensor maps.
///
/// ```
/// use burn_fp4_search::E4m3Range;
///
/// assert_eq!((E4m3Range::E448.value(), E4m3Range::E256.value()), (448.0, 256.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum E4m3Range {
    /// The largest block scale: 448 for E4M3. A block holding the amax cannot choose element 4.
    #[default]
    #[serde(rename = "448")]
    E448,
    /// 256: a scale 1.5 times as large, as four-over-six tries it, is then at most 384 and finite.
    #[serde(rename = "256")]
    E256,
}

impl E4m3Range {
    /// Returns the value for the block scales of NVFP4.
    #[must_use]
    pub const fn value(self) -> f32 {
        self.of(&Fp4Format::NvFp4.row().block_scale)
    }

    /// Returns the value for block scales of a number format.
    pub(crate) const fn of(self, block_scale: &Minifloat) -> f32 {
        match self {
            Self::E448 => block_scale.max_value(),
            Self::E256 => 256.0,
        }
    }
}

/// Sums the errors of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorMetric {
    /// Sum of magnitudes.
    #[default]
    Mae,
    /// Sum of squares.
    Mse,
}

/// Statistics of the inputs of a layer, from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Needs {
    /// None.
    Nothing,
    /// The mean square of every channel: the diagonal of `X^T X`.
    SecondMoments,
    /// The part of `X^T X` for the channels of each block.
    BlockHessians,
    /// All of `X^T X`.
    Gram,
}

/// A [`Method`] with a name, and its facts.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct MethodRow {
    /// Name in tables, in files and on command lines.
    pub name: &'static str,
    /// The method, with the options that the name stands for.
    pub method: Method,
    /// Statistics of activations that it needs.
    pub needs: Needs,
    /// True if it needs any statistics.
    pub calibrated: bool,
    /// Formats that it is defined for.
    pub formats: &'static [Fp4Format],
    /// Summary in one line.
    pub summary: &'static str,
}

impl MethodRow {
    /// The row of a method for every format.
    const fn new(name: &'static str, method: Method, needs: Needs, summary: &'static str) -> Self {
        let calibrated = !matches!(needs, Needs::Nothing);
        Self { name, method, needs, calibrated, formats: &Fp4Format::ALL, summary }
    }

    /// The same for NVFP4 alone.
    const fn only_nvfp4(self) -> Self {
        Self { formats: &[Fp4Format::NvFp4], ..self }
    }
}

impl Method {
    /// [`Sse`](Self::Sse) without options.
    pub const SSE: Self = Self::Sse(Sse::Uniform);
    /// The method of weights without the statistics of inputs that another method needs. It keeps
    /// rule and tensor scale, which weights may share.
    pub const FALLBACK: Self = Self::SSE;
    /// [`FourOverSix`](Self::FourOverSix) with the options of TransformerEngine.
    pub const FOUR_OVER_SIX: Self =
        Self::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    /// [`Admm`](Self::Admm) from the best known solution.
    pub const ADMM: Self = Self::Admm(Admm::BestIterate);
    /// [`Gptq`](Self::Gptq) with blocks in order of activity, then sweeps over codes and scales.
    pub const GPTQ: Self = Self::Gptq(Gptq::DEFAULT);

    /// Maximum number of passes of [`CoordinateDescent`](Self::CoordinateDescent) over the elements
    /// of a block. Most blocks need two.
    pub const SWEEPS: usize = 8;

    /// Every method with a name, from the fastest to the most accurate.
    pub const NAMED: [MethodRow; 11] = {
        use Needs::{BlockHessians, Gram, Nothing, SecondMoments};
        let row = MethodRow::new;
        [
            row("amax", Self::Amax, Nothing, "the scale that the rule makes of the block's amax"),
            row(
                "four-over-six",
                Self::FOUR_OVER_SIX,
                Nothing,
                "amax on element 6 or on element 4, whichever has the smaller error",
            )
            .only_nvfp4(),
            row("sse", Self::SSE, Nothing, "the scale with the smallest squared error of all"),
            row(
                "sse-tensor-scale",
                Self::Sse(Sse::TensorScale),
                Nothing,
                "sse with the best of 16 tensor scales",
            )
            .only_nvfp4(),
            row(
                "sse-weighted",
                Self::Sse(Sse::Weighted),
                SecondMoments,
                "sse, errors weighted by their channel's activity",
            ),
            row(
                "hessian",
                Self::Hessian,
                BlockHessians,
                "the scale with the smallest r^T H r of nearest codes",
            ),
            row(
                "coordinate-descent",
                Self::CoordinateDescent,
                BlockHessians,
                "scale and codes, improved one at a time",
            ),
            row(
                "admm-published",
                Self::Admm(Admm::Published),
                BlockHessians,
                "ADMM as qwantize has it",
            ),
            row(
                "admm",
                Self::ADMM,
                BlockHessians,
                "ADMM from the best known solution, best iterate kept",
            ),
            row("gptq-original", Self::Gptq(Gptq::ORIGINAL), Gram, "GPTQ as published"),
            row("gptq", Self::GPTQ, Gram, "GPTQ by activity, then sweeps over codes and scales"),
        ]
    };

    /// Returns the method with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.into_iter().find(|row| row.name == name).map(|row| row.method)
    }

    /// Returns the facts of the method. A method with options of its own has the row of the default
    /// options.
    #[must_use]
    pub fn row(self) -> &'static MethodRow {
        static NAMED: [MethodRow; Method::NAMED.len()] = Method::NAMED;
        let default = match self {
            Self::FourOverSix { .. } => Self::FOUR_OVER_SIX,
            Self::Gptq(options) if options != Gptq::ORIGINAL => Self::GPTQ,
            Self::Gptq(_)
            | Self::Amax
            | Self::Sse(_)
            | Self::Hessian
            | Self::CoordinateDescent
            | Self::Admm(_) => self,
        };
        NAMED.iter().find(|row| row.method == default).expect("every method has a row")
    }

    /// Returns the statistics that the method needs of the inputs of a layer.
    #[must_use]
    pub fn needs(self) -> Needs {
        self.row().needs
    }

    /// Returns true if the method needs any statistics of inputs.
    #[must_use]
    pub fn needs_inputs(self) -> bool {
        self.row().calibrated
    }

    /// Returns true if the method searches blocks with their Hessians.
    #[must_use]
    pub const fn needs_hessians(self) -> bool {
        matches!(self, Self::Hessian | Self::CoordinateDescent | Self::Admm(_))
    }

    /// Returns true if the method quantizes each block by itself, from its values alone.
    #[must_use]
    pub const fn is_blockwise(self) -> bool {
        matches!(self, Self::Amax | Self::FourOverSix { .. } | Self::Sse(Sse::Uniform))
    }

    /// Returns the options of GPTQ; `None` for other methods.
    #[must_use]
    pub const fn gptq(self) -> Option<Gptq> {
        match self {
            Self::Gptq(options) => Some(options),
            _ => None,
        }
    }

    /// Returns the options of a method with a table of options, in words.
    pub(crate) fn options(self) -> Vec<String> {
        let word = |value: &dyn fmt::Debug| format!("{value:?}").to_lowercase();
        match self {
            Self::FourOverSix { range, error } => {
                vec![format!("range {}", range.value()), format!("error {}", word(&error))]
            }
            Self::Gptq(Gptq { damping, order, sweeps, refits, correction }) => vec![
                format!("damping {damping}"),
                format!("order {}", word(&order)),
                format!("sweeps {sweeps}"),
                format!("refits {refits}"),
                format!("correction {correction}"),
            ],
            Self::Amax | Self::Sse(_) | Self::Hessian | Self::CoordinateDescent | Self::Admm(_) => {
                Vec::new()
            }
        }
    }

    /// Returns true if the method sums over a whole matrix. Each engine does that in its own order,
    /// so bits may differ from the host's. All other methods have the same bits on every engine.
    #[must_use]
    pub const fn sums_matrices(self) -> bool {
        matches!(self, Self::Sse(Sse::TensorScale) | Self::Gptq(_))
    }
}

impl From<Gptq> for Method {
    fn from(options: Gptq) -> Self {
        Self::Gptq(options)
    }
}

/// A method in a file: its name, or a table of options that no name stands for.
#[derive(Serialize)]
#[serde(untagged)]
enum Written {
    Name(&'static str),
    Options(WrittenOptions),
}

/// The table of options of a method, under its name.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct WrittenOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    four_over_six: Option<FourOverSix>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gptq: Option<Gptq>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FourOverSix {
    range: E4m3Range,
    error: ErrorMetric,
}

impl From<Method> for Written {
    fn from(method: Method) -> Self {
        let row = method.row();
        match method {
            Method::FourOverSix { range, error } if method != row.method => {
                let four_over_six = Some(FourOverSix { range, error });
                Self::Options(WrittenOptions { four_over_six, ..WrittenOptions::default() })
            }
            Method::Gptq(options) if method != row.method => {
                let gptq = Some(options);
                Self::Options(WrittenOptions { gptq, ..WrittenOptions::default() })
            }
            Method::FourOverSix { .. }
            | Method::Gptq(_)
            | Method::Amax
            | Method::Sse(_)
            | Method::Hessian
            | Method::CoordinateDescent
            | Method::Admm(_) => Self::Name(row.name),
        }
    }
}

impl<'de> Deserialize<'de> for Method {
    // Not as an untagged enum, whose errors do not name the field.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrOptions;

        impl<'de> Visitor<'de> for NameOrOptions {
            type Value = Method;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a method, or a table such as { gptq = { damping = 0.1 } }")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Method, E> {
                name.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Method, A::Error> {
                let options = WrittenOptions::deserialize(MapAccessDeserializer::new(map))?;
                match (options.four_over_six, options.gptq) {
                    (Some(FourOverSix { range, error }), None) => {
                        Ok(Method::FourOverSix { range, error })
                    }
                    (None, Some(options)) => Ok(Method::Gptq(options)),
                    _ => Err(A::Error::custom("a method has one table of options; write one")),
                }
            }
        }

        deserializer.deserialize_any(NameOrOptions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct File {
        method: Method,
    }

    fn read(text: &str) -> Method {
        toml::from_str::<File>(text).expect("a method").method
    }

    #[test]
    fn a_method_is_written_with_its_name_or_its_options() {
        let tuned = Method::Gptq(Gptq { damping: 0.1, ..Gptq::DEFAULT });
        let paper = Method::FourOverSix { range: E4m3Range::E448, error: ErrorMetric::Mae };
        let methods = Method::NAMED.map(|row| row.method);
        for method in methods.into_iter().chain([tuned, paper]) {
            let text = toml::to_string(&File { method }).expect("a table");
            assert_eq!(read(&text), method, "{text}");
            assert_eq!(text == format!("method = \"{method}\"\n"), methods.contains(&method));
            assert_eq!(method.row().method.row(), method.row());
            let name = method.row().name;
            assert_eq!(name.parse(), Ok(method.row().method));
            assert_eq!(method.to_string() == name, methods.contains(&method));
        }
        assert_eq!(read("method = { gptq = { damping = 0.1 } }"), tuned);
    }

    #[test]
    fn an_error_of_a_table_of_options_names_the_field() {
        for (wrong, named) in [
            ("{ four-over-six = { range = \"256\", error = \"mse\", rnge = 1 } }", "`rnge`"),
            ("{ four-over-six = { range = \"256\" } }", "missing field `error`"),
            ("{ gptq = { dampening = 0.1 } }", "unknown field `dampening`, expected one of"),
            ("{ gptq = { damping = \"0.1\" } }", "expected f64"),
            ("{ gptqq = {} }", "unknown field `gptqq`, expected `four-over-six` or `gptq`"),
            ("{ gptq = {}, sse = {} }", "`sse`"),
            ("{}", "one table of options"),
            ("\"gptqq\"", "unknown method `gptqq`"),
            ("3", "the name of a method"),
        ] {
            let error = toml::from_str::<File>(&format!("method = {wrong}")).err();
            let error = error.expect(wrong).to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn options_that_a_name_does_not_stand_for_are_displayed() {
        let gptq = |options| Method::Gptq(options).to_string();
        assert_eq!(gptq(Gptq::DEFAULT), "gptq");
        assert_eq!(gptq(Gptq::ORIGINAL), "gptq-original");
        let order = crate::gptq::BlockOrder::Natural;
        let options = Gptq { damping: 0.1, order, sweeps: 1, ..Gptq::DEFAULT };
        assert_eq!(gptq(options), "gptq (damping 0.1, order natural, sweeps 1)");
        let paper = Method::FourOverSix { range: E4m3Range::E448, error: ErrorMetric::Mse };
        assert_eq!(paper.to_string(), "four-over-six (range 448)");
        assert_eq!(format!("{:>8}|{:<6}|", Method::Amax, Method::SSE), "    amax|sse   |");
    }
}
