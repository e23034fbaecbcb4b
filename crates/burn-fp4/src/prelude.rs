//! The items that most programs need, in one import: `use burn_fp4::prelude::*`.
//!
//! Its two traits add methods to every Burn module ([`Fp4Module`]) and to checkpoints
//! ([`LoadCheckpoint`]). No name is one of `burn::prelude`.

pub use crate::{
    Calibration, CalibrationOptions, Checkpoint, CheckpointMap, FakeQuantize, FakeQuantizeConfig,
    FileLayout, Fp4Config, Fp4Embedding, Fp4Error, Fp4Linear, Fp4Module, Fp4Report, Fp4Scheme,
    Fp4TrainLinear, Indivisible, LoadCheckpoint, Method, PackedWeight, Saturated, TrainRecipe,
    Unused,
};
