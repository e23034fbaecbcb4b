//! Products and sums with fixed, not autotuned, kernels: the results are identical in every run,
//! and on any number of equal GPUs.

use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::matmul::init_matmul_output;
use burn_cubecl::kernel::reduce::{KernelReduceStrategy, reduce_dim};
use burn_cubecl::tensor::CubeTensor;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy as MultiLevel;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::matmul::strategy::Strategy;
use cubek::reduce::components::instructions::ReduceOperationConfig;
use cubek::std::InputBinding;

/// Implements [`fp4_deterministic_matmul`](crate::Fp4Backend::fp4_deterministic_matmul).
pub(super) fn matmul(left: CubeTensor, right: CubeTensor) -> CubeTensor {
    let output = init_matmul_output(&left, &right, left.dtype);
    if output.meta.shape().num_elements() == 0 {
        return output;
    }
    let dtype = dtype_to_storage_type(left.dtype);
    let operand = |tensor: &CubeTensor| InputBinding::new(tensor.clone().binding(), dtype);
    let run = |strategy: &Strategy| {
        let global = MatmulGlobalElems { lhs: dtype, rhs: dtype, out: dtype };
        let to = output.clone().binding();
        let mut dtypes = MatmulElems::from_globals(&global);
        launch_ref(strategy, &left.client, operand(&left), operand(&right), to, &mut dtypes)
    };
    let by_planes = SimpleArgs { multi_rows: true, tile_matmul: TileMatmulKind::Mma };
    // Fast on GPUs; on most devices with matrix instructions; without matrix instructions.
    let strategies = [
        MultiLevel::SimpleCyclicMma(BlueprintStrategy::Inferred(by_planes)),
        MultiLevel::SimpleCyclicCmma(Default::default()),
        MultiLevel::SimpleUnit(Default::default()),
    ];
    let ran = strategies.into_iter().any(|strategy| run(&strategy.into()).is_ok());
    if !ran {
        run(&MultiLevel::Naive.into()).expect("the naive kernel takes any matrices");
    }
    output
}

/// Implements [`fp4_deterministic_sum`](crate::Fp4Backend::fp4_deterministic_sum).
pub(super) fn sum(values: CubeTensor, axis: usize, mean: bool) -> CubeTensor {
    let operation = if mean { ReduceOperationConfig::Mean } else { ReduceOperationConfig::Sum };
    reduce_dim(values, None, axis, KernelReduceStrategy::Unspecified, operation)
        .expect("the axis was checked")
}
