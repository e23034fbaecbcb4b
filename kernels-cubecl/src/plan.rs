use burn_fp4_search::{Blocks, ScaleSearch, SearchError};

use crate::Problem;

/// What is to be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Largest magnitude of the tensor.
    Amax,
    /// Largest magnitude of each packed row.
    RowAmax,
    /// Codes and scales.
    Quantize,
    /// Values of codes and scales.
    Dequantize,
}

/// How an operation is launched: one dimension of cubes of one dimension of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Cubes.
    pub cubes: u32,
    /// Units of a cube.
    pub units: u32,
    /// Work items; units beyond have nothing to do.
    pub items: u32,
}

/// Why an operation is not launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The scheme is inconsistent, or its blocks do not divide the axis.
    #[error(transparent)]
    Scheme(#[from] SearchError),
    /// Indices are 32 bits wide.
    #[error("a tensor of {found} values: at most {expected} are addressed by 32 bits")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number supported.
        expected: usize,
    },
    /// There is no kernel for this choice yet.
    #[error("{0} has no kernel yet")]
    NoKernel(&'static str),
}

/// Units of a cube.
const UNITS: u32 = 256;

/// Enough cubes to fill a large GPU; each then takes many items.
const AMAX_CUBES: u32 = 264;

/// Decides how an operation is launched, from the problem alone.
///
/// # Errors
/// [`Refusal`] if it cannot be.
pub fn plan(operation: Operation, problem: &Problem) -> Result<Launch, Refusal> {
    let Problem { view, scheme, .. } = problem;
    scheme.check_columns(view.axis)?;
    let expected = i32::MAX as usize;
    if view.len() > expected {
        return Err(Refusal::TooLarge { found: view.len(), expected });
    }
    if operation == Operation::Quantize {
        if scheme.blocks == Blocks::Tile16x16 {
            return Err(Refusal::NoKernel("Blocks::Tile16x16"));
        }
        if scheme.search != ScaleSearch::Amax {
            return Err(Refusal::NoKernel("ScaleSearch::FourOverSix"));
        }
    }
    let items = match operation {
        Operation::Amax => view.len(),
        Operation::RowAmax => view.packed_rows(),
        Operation::Quantize => view.packed_rows() * problem.blocks(),
        Operation::Dequantize => view.len() / 8,
    } as u32;
    let cubes = items.div_ceil(UNITS);
    let cubes = if operation == Operation::Amax { cubes.min(AMAX_CUBES) } else { cubes };
    Ok(Launch { cubes, units: UNITS, items })
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::host::View;
    use burn_fp4_search::{Fp4Scheme, ScaleRule};

    use super::*;
    use crate::Dtype;

    fn problem(view: View, scheme: Fp4Scheme) -> Problem {
        Problem { view, dtype: Dtype::Bf16, scheme }
    }

    #[test]
    fn one_unit_per_block_and_per_eight_codes() {
        let problem = problem(View::rows(3, 1024), Fp4Scheme::nvfp4());
        let quantize = plan(Operation::Quantize, &problem).unwrap();
        assert_eq!(quantize, Launch { cubes: 1, units: 256, items: 192 });
        assert_eq!(plan(Operation::Dequantize, &problem).unwrap().items, 384);
        assert_eq!(plan(Operation::RowAmax, &problem).unwrap().items, 3);
        let large = self::problem(View::rows(8192, 8192), Fp4Scheme::nvfp4());
        assert_eq!(plan(Operation::Amax, &large).unwrap().cubes, AMAX_CUBES);
    }

    #[test]
    fn refusals_name_the_reason() {
        let odd = problem(View::rows(3, 24), Fp4Scheme::nvfp4());
        assert!(matches!(plan(Operation::Quantize, &odd), Err(Refusal::Scheme(_))));
        let large = problem(View::rows(1 << 16, 1 << 16), Fp4Scheme::nvfp4());
        assert!(matches!(plan(Operation::Amax, &large), Err(Refusal::TooLarge { .. })));
        let tiles = Fp4Scheme::of(ScaleRule::Te).with_blocks(Blocks::Tile16x16);
        let tiles = problem(View::rows(16, 16), tiles);
        assert_eq!(plan(Operation::Quantize, &tiles), Err(Refusal::NoKernel("Blocks::Tile16x16")));
        assert!(plan(Operation::Dequantize, &tiles).is_ok());
    }
}
