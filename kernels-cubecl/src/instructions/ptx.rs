//! Instructions of Hopper as operations of our own; the only file with PTX.
//!
//! CubeCL's compiler has neither asynchronous copies nor the matrix instructions of a warpgroup.
//! The operations here are lowered to inline assembly instead. `wgmma.rs` and `mma.rs` define them;
//! [`prefetch_l2`] is for `matmul/prefetch.rs`, [`arrive`] and [`await_count`] for launches whose
//! cubes wait for each other.
//!
//! The descriptor of B has 64 bits, with addresses and distances in units of 16 bytes:
//!
//! ```text
//! bit 0     the address of its first row
//!     16    1, not used by this swizzle
//!     32    64: from eight rows to the next eight, of k if B is transposed
//!     62    1: vectors of 16 bytes are swizzled within 128
//! ```

use burn_fp4_search::formats::{E4M3, ScaleGrid};
use cubecl::prelude::*;
use cubecl_ir::attributes::IndexAttr;
use cubecl_ir::{CanMaterialize, HasSideEffects, Pure, prelude::*};
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use half::f16;
use pliron::builtin::attributes::StringAttr;
use pliron::builtin::types::{FP32Type, IntegerType, Signedness};
use pliron::r#type::TypeHandle;
use pliron::value::Value;
use pliron_llvm::llvm_attrs::LlvmAttrValue;
use pliron_llvm::ops as llvm;
use pliron_llvm::types::{StructLayout, StructType, VoidType};

use super::mma::{MmaInstructions, Pair, PlaneMma};
use super::wgmma::{Operand, WgmmaInstructions};

/// Words of A that a unit holds.
const WORDS: usize = 4;

/// Inserts volatile assembly, which keeps its place, and returns its result.
fn assembly(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    result: TypeHandle,
    inputs: Vec<Value>,
    text: &str,
    constraints: &str,
) -> Value {
    let op = llvm::InlineAsmOp::new(ctx, result, inputs, text, constraints, true);
    rewriter.insert_op(ctx, &op);
    op.get_result(ctx)
}

fn word_type(ctx: &Context) -> TypeHandle {
    IntegerType::get(ctx, 32, Signedness::Signless).into()
}

/// Replaces an operation on words by an instruction without side effects.
fn replace_by(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    operation: Ptr<Operation>,
    inputs: Vec<Value>,
    text: &str,
) {
    let constraints = format!("=r{}", ",r".repeat(inputs.len()));
    let word = word_type(ctx);
    let op = llvm::InlineAsmOp::new(ctx, word, inputs, text, &constraints, false);
    rewriter.insert_op(ctx, &op);
    let result = op.get_result(ctx);
    rewriter.replace_operation_with_values(ctx, operation, vec![result]);
}

/// Returns the pointers to the values at an address.
fn pointers(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    first: Value,
    of: TypeHandle,
    count: usize,
) -> Vec<Value> {
    let mut pointer = |index| {
        let index = llvm::GepIndex::Constant(index as u32);
        let pointer = llvm::GetElementPtrOp::new(ctx, first, vec![index], of);
        rewriter.insert_op(ctx, &pointer);
        pointer.get_result(ctx)
    };
    (0..count).map(&mut pointer).collect()
}

/// Loads the values at an address. Returns the pointers and the values.
fn load_all(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    from: Value,
    of: TypeHandle,
    count: usize,
) -> (Vec<Value>, Vec<Value>) {
    let pointers = pointers(ctx, rewriter, from, of, count);
    let mut load = |&pointer: &Value| {
        let value = llvm::LoadOp::new(ctx, pointer, of);
        rewriter.insert_op(ctx, &value);
        value.get_result(ctx)
    };
    let values = pointers.iter().map(&mut load).collect();
    (pointers, values)
}

/// Stores the fields of a result of assembly.
fn store_all(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    result: Value,
    pointers: Vec<Value>,
) {
    for (index, pointer) in pointers.into_iter().enumerate() {
        let value = llvm::ExtractValueOp::new(ctx, result, vec![index as u32]).expect("a field");
        rewriter.insert_op(ctx, &value);
        let store = llvm::StoreOp::new(ctx, value.get_result(ctx), pointer);
        rewriter.insert_op(ctx, &store);
    }
}

/// Inserts assembly that updates the sums at an address; `inputs` are its operands after the sums.
fn change_sums(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    sums: Value,
    count: usize,
    inputs: Vec<Value>,
    text: &str,
) {
    let float: TypeHandle = FP32Type::get(ctx).into();
    let (pointers, values) = load_all(ctx, rewriter, sums, float, count);
    let outputs = vec!["=f"; count].join(",");
    let words = ",r".repeat(inputs.len());
    let same: String = (0..count).map(|index| format!(",{index}")).collect();
    let constraints = format!("{outputs}{words}{same},~{{memory}}");
    let result = StructType::get_unnamed(ctx, (vec![float; count], StructLayout::Unpacked)).into();
    let operands = inputs.into_iter().chain(values).collect();
    let changed = assembly(ctx, rewriter, result, operands, text, &constraints);
    store_all(ctx, rewriter, changed, pointers);
}

#[cube_op(name = "fp4.select_bytes")]
#[result_ty(same_as = low)]
#[op_traits(CanMaterialize, Pure)]
struct SelectBytesOp {
    low: Value,
    high: Value,
    selectors: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for SelectBytesOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.low(ctx), self.high(ctx), self.selectors(ctx)];
        let text = "prmt.b32 $0, $1, $2, $3;";
        replace_by(ctx, rewriter, self.get_operation(), inputs, text);
        Ok(())
    }
}

#[cube_op(name = "fp4.merge_bits")]
#[result_ty(same_as = ones)]
#[op_traits(CanMaterialize, Pure)]
struct MergeBitsOp {
    mask: Value,
    ones: Value,
    zeros: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for MergeBitsOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.mask(ctx), self.ones(ctx), self.zeros(ctx)];
        let text = "lop3.b32 $0, $1, $2, $3, 0xCA;";
        replace_by(ctx, rewriter, self.get_operation(), inputs, text);
        Ok(())
    }
}

#[cube_op(name = "fp4.widen_e4m3")]
#[result_ty(same_as = word)]
#[op_traits(CanMaterialize, Pure)]
struct WidenE4m3Op {
    word: Value,
    pair: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for WidenE4m3Op {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.word(ctx)];
        let half = if self.pair(ctx).0 == 0 { "low" } else { "high" };
        let text = &format!(
            "{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}"
        );
        replace_by(ctx, rewriter, self.get_operation(), inputs, text);
        Ok(())
    }
}

#[cube_op(name = "fp4.shared_address")]
#[result_ty(fixed = IntegerType::get(ctx, 32, Signedness::Unsigned).into())]
#[op_traits(CanMaterialize, HasSideEffects)]
struct SharedAddressOp {
    #[operand(ptr_write)]
    shared: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for SharedAddressOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let shared = self.shared(ctx);
        let ty = word_type(ctx);
        let text = "{ .reg .b64 to; cvta.to.shared.u64 to, $1; cvt.u32.u64 $0, to; }";
        let address = assembly(ctx, rewriter, ty, vec![shared], text, "=r,l,~{memory}");
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![address]);
        Ok(())
    }
}

#[cube_op(name = "fp4.copy_async")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct CopyAsyncOp {
    wanted: Value,
    to: Value,
    #[operand(ptr_read)]
    from: Value,
    at: Value,
    /// Further bytes from there.
    offset: IndexAttr,
    bytes: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for CopyAsyncOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let (offset, bytes) = (self.offset(ctx).0, self.bytes(ctx).0);
        // Only copies of 16 bytes can bypass L1.
        let cache = if bytes == 16 { "cg" } else { "ca" };
        let text = format!(
            "{{ .reg .pred p; .reg .b64 from; setp.ne.u32 p, $3, 0; \
             mad.wide.u32 from, $2, {bytes}, $1; \
             @p cp.async.{cache}.shared.global [$0], [from + {offset}], {bytes}; }}"
        );
        let inputs = vec![self.to(ctx), self.from(ctx), self.at(ctx), self.wanted(ctx)];
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, &text, "r,l,r,r,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.round_to_e4m3")]
#[result_ty(same_as = first)]
#[op_traits(CanMaterialize, Pure)]
struct RoundToE4m3Op {
    // Bits of floats.
    first: Value,
    second: Value,
    third: Value,
    fourth: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for RoundToE4m3Op {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let values = vec![self.first(ctx), self.second(ctx), self.third(ctx), self.fourth(ctx)];
        let text = "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; \
                    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }";
        let ty = word_type(ctx);
        let op = llvm::InlineAsmOp::new(ctx, ty, values, text, "=r,r,r,r,r", false);
        rewriter.insert_op(ctx, &op);
        let word = op.get_result(ctx);
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![word]);
        Ok(())
    }
}

#[cube_op(name = "fp4.exp2")]
#[result_ty(same_as = value)]
#[op_traits(CanMaterialize, Pure)]
struct Exp2Op {
    value: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for Exp2Op {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.value(ctx)];
        let float: TypeHandle = FP32Type::get(ctx).into();
        let text = "ex2.approx.ftz.f32 $0, $1;";
        let op = llvm::InlineAsmOp::new(ctx, float, inputs, text, "=f,f", false);
        rewriter.insert_op(ctx, &op);
        let power = op.get_result(ctx);
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![power]);
        Ok(())
    }
}

#[cube_op(name = "fp4.load_word")]
#[result_ty(same_as = at)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct LoadWordOp {
    #[operand(ptr_read)]
    from: Value,
    at: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for LoadWordOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.from(ctx), self.at(ctx)];
        let text = "{ .reg .b64 from; mad.wide.u32 from, $2, 4, $1; \
                    ld.relaxed.cta.global.b32 $0, [from]; }";
        let ty = word_type(ctx);
        let word = assembly(ctx, rewriter, ty, inputs, text, "=r,l,r,~{memory}");
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![word]);
        Ok(())
    }
}

#[cube_op(name = "fp4.load_vector")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct LoadVectorOp {
    #[operand(ptr_read)]
    from: Value,
    at: Value,
    #[operand(ptr_write)]
    words: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for LoadVectorOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.from(ctx), self.at(ctx)];
        let text = "{ .reg .b64 from; mad.wide.u32 from, $5, 16, $4; \
                    ld.relaxed.cta.global.v4.b32 {$0,$1,$2,$3}, [from]; }";
        let word = word_type(ctx);
        let result = StructType::get_unnamed(ctx, (vec![word; WORDS], StructLayout::Unpacked));
        let constraints = "=r,=r,=r,=r,l,r,~{memory}";
        let loaded = assembly(ctx, rewriter, result.into(), inputs, text, constraints);
        let pointers = pointers(ctx, rewriter, self.words(ctx), word, WORDS);
        store_all(ctx, rewriter, loaded, pointers);
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.load_shared")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct LoadSharedOp {
    from: Value,
    #[operand(ptr_write)]
    words: Value,
    offset: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for LoadSharedOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.from(ctx)];
        let text = format!("ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{}];", self.offset(ctx).0);
        let word = word_type(ctx);
        let result = StructType::get_unnamed(ctx, (vec![word; WORDS], StructLayout::Unpacked));
        let constraints = "=r,=r,=r,=r,r,~{memory}";
        let loaded = assembly(ctx, rewriter, result.into(), inputs, &text, constraints);
        let pointers = pointers(ctx, rewriter, self.words(ctx), word, WORDS);
        store_all(ctx, rewriter, loaded, pointers);
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.start_barrier")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct StartBarrierOp {
    wanted: Value,
    barrier: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for StartBarrierOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.wanted(ctx), self.barrier(ctx)];
        let text = "{ .reg .pred p; setp.ne.u32 p, $0, 0; @p mbarrier.init.shared.b64 [$1], 1; }";
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, text, "r,r,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.copy_rows")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct CopyRowsOp {
    wanted: Value,
    to: Value,
    #[operand(ptr_read)]
    from: Value,
    at: Value,
    barrier: Value,
    bytes: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for CopyRowsOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let bytes = self.bytes(ctx).0;
        let text = format!(
            "{{ .reg .pred p; .reg .b64 from; setp.ne.u32 p, $4, 0; \
             mad.wide.u32 from, $2, 16, $1; \
             @p mbarrier.arrive.expect_tx.shared.b64 _, [$3], {bytes}; \
             @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
             [$0], [from], {bytes}, [$3]; }}"
        );
        let inputs =
            vec![self.to(ctx), self.from(ctx), self.at(ctx), self.barrier(ctx), self.wanted(ctx)];
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, &text, "r,l,r,r,r,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.wait_for_rows")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct WaitForRowsOp {
    barrier: Value,
    parity: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for WaitForRowsOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.barrier(ctx), self.parity(ctx)];
        let text = "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; \
                    @!p bra again; }";
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, text, "r,r,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.arrive")]
#[result_ty(fixed = IntegerType::get(ctx, 32, Signedness::Unsigned).into())]
#[op_traits(CanMaterialize, HasSideEffects)]
struct ArriveOp {
    #[operand(ptr_write)]
    counters: Value,
    at: Value,
    acquires: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for ArriveOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.counters(ctx), self.at(ctx)];
        let after = if self.acquires(ctx).0 == 0 { "" } else { "fence.acq_rel.gpu; " };
        let text = &format!(
            "{{ .reg .b64 to; mad.wide.u32 to, $2, 4, $1; fence.acq_rel.gpu; \
             atom.relaxed.gpu.global.add.u32 $0, [to], 1; {after}}}"
        );
        let word = word_type(ctx);
        let before = assembly(ctx, rewriter, word, inputs, text, "=r,l,r,~{memory}");
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![before]);
        Ok(())
    }
}

#[cube_op(name = "fp4.publish")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct PublishOp {
    #[operand(ptr_write)]
    memory: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for PublishOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let void = VoidType::get(ctx).into();
        let inputs = vec![self.memory(ctx)];
        assembly(ctx, rewriter, void, inputs, "", "l,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.await_count")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct AwaitCountOp {
    #[operand(ptr_read)]
    counters: Value,
    at: Value,
    count: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for AwaitCountOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let inputs = vec![self.counters(ctx), self.at(ctx), self.count(ctx)];
        let text = "{ .reg .pred p; .reg .b64 from; .reg .b32 found; mad.wide.u32 from, $1, 4, $0; \
                    again: ld.acquire.gpu.global.u32 found, [from]; \
                    setp.lt.u32 p, found, $2; @p bra again; }";
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, text, "l,r,r,~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.cubes_at_once")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct CubesAtOnceOp {
    cubes: IndexAttr,
}

/// An attribute of the function that the operation is in, which is an LLVM function only after
/// CubeCL's own operations are lowered.
#[op_interface_impl]
impl pliron_llvm::ToLLVMDialect for CubesAtOnceOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let mut parent = self.get_operation().deref(ctx).get_parent_op(ctx);
        while let Some(operation) = parent {
            if let Some(function) = Operation::get_op::<llvm::FuncOp>(operation, ctx) {
                let attributes = function.get_attr_llvm_func_attrs(ctx).map(|known| known.clone());
                let mut attributes = attributes.unwrap_or_default();
                let cubes = self.cubes(ctx).0.to_string();
                attributes.set("nvvm.minctasm", LlvmAttrValue::Str(cubes));
                function.set_attr_llvm_func_attrs(ctx, attributes);
                break;
            }
            parent = operation.deref(ctx).get_parent_op(ctx);
        }
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.prefetch")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct PrefetchOp {
    #[operand(ptr_read)]
    from: Value,
    at: Value,
    bytes: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for PrefetchOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let text = "{ .reg .b64 from; mad.wide.u32 from, $1, 1, $0; and.b64 from, from, -16; \
                    cp.async.bulk.prefetch.L2.global [from], $2; }";
        let inputs = vec![self.from(ctx), self.at(ctx), self.bytes(ctx)];
        let void = VoidType::get(ctx).into();
        // Memory does not change, so there is no clobber: loads may move across.
        assembly(ctx, rewriter, void, inputs, text, "l,r,r");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.order")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct OrderOp {
    text: StringAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for OrderOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let text: String = self.text(ctx).clone().into();
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, vec![], &text, "~{memory}");
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.multiply")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct MultiplyOp {
    #[operand(ptr_read)]
    a: Value,
    b: Value,
    #[operand(ptr_write)]
    sums: Value,
    columns: IndexAttr,
    /// The end of the instruction's name: its values of k and the types.
    kind: StringAttr,
    /// Immediate operands of the instruction.
    immediates: StringAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for MultiplyOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let columns = self.columns(ctx).0;
        let kind: String = self.kind(ctx).clone().into();
        let immediates: String = self.immediates(ctx).clone().into();
        let own = columns / 2;
        let word = word_type(ctx);
        let (_, words) = load_all(ctx, rewriter, self.a(ctx), word, WORDS);
        let inputs: Vec<_> = words.into_iter().chain([self.b(ctx)]).collect();
        let list = |first: usize, count: usize| {
            (first..first + count).map(|index| format!("${index}")).collect::<Vec<_>>().join(",")
        };
        let text = format!(
            "{{ .reg .b64 b; .reg .b32 at; and.b32 at, ${}, 0x3FFFF; shr.u32 at, at, 4; \
             or.b32 at, at, 0x10000; mov.b64 b, {{at, 0x40000040}}; wgmma.fence.sync.aligned; \
             wgmma.mma_async.sync.aligned.m64n{columns}{kind} \
             {{{}}}, {{{}}}, b, {immediates}; wgmma.commit_group.sync.aligned; }}",
            own + WORDS,
            list(0, own),
            list(own, WORDS)
        );
        change_sums(ctx, rewriter, self.sums(ctx), own, inputs, &text);
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

#[cube_op(name = "fp4.wait_for_sums")]
#[result_ty(none)]
#[op_traits(CanMaterialize, HasSideEffects)]
struct WaitForSumsOp {
    #[operand(ptr_write)]
    sums: Value,
    count: IndexAttr,
}

#[op_interface_impl]
impl ToLLVMDialect for WaitForSumsOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let count = self.count(ctx).0;
        let text = "wgmma.wait_group.sync.aligned 0;";
        change_sums(ctx, rewriter, self.sums(ctx), count, vec![], text);
        rewriter.erase_operation(ctx, self.get_operation());
        Ok(())
    }
}

/// Returns the values of two codes of E4M3 in a word, as two f16.
#[cube]
#[allow(unused_variables)]
fn widen_e4m3(word: u32, #[comptime] pair: usize) -> u32 {
    intrinsic!(|scope| {
        let word = word.read_value(scope);
        let op = WidenE4m3Op::new(scope.ctx_mut(), word, IndexAttr(pair));
        scope.register_with_result(&op).into()
    })
}

/// Returns the bits of `ones` where a mask has ones, and those of `zeros` elsewhere.
#[cube]
#[allow(unused_variables)]
fn merge_bits(mask: u32, ones: u32, zeros: u32) -> u32 {
    intrinsic!(|scope| {
        let mask = mask.read_value(scope);
        let (ones, zeros) = (ones.read_value(scope), zeros.read_value(scope));
        let op = MergeBitsOp::new(scope.ctx_mut(), mask, ones, zeros);
        scope.register_with_result(&op).into()
    })
}

#[cube]
#[allow(unused_variables)]
fn permute_bytes(low: u32, high: u32, selectors: u32) -> u32 {
    intrinsic!(|scope| {
        let (low, high) = (low.read_value(scope), high.read_value(scope));
        let selectors = selectors.read_value(scope);
        let op = SelectBytesOp::new(scope.ctx_mut(), low, high, selectors);
        scope.register_with_result(&op).into()
    })
}

#[cube]
#[allow(unused_variables)]
fn round_bits(first: u32, second: u32, third: u32, fourth: u32) -> u32 {
    intrinsic!(|scope| {
        let (first, second) = (first.read_value(scope), second.read_value(scope));
        let (third, fourth) = (third.read_value(scope), fourth.read_value(scope));
        let op = RoundToE4m3Op::new(scope.ctx_mut(), first, second, third, fourth);
        scope.register_with_result(&op).into()
    })
}

#[cube]
#[allow(unused_variables)]
fn approximate_exp2(value: f32) -> f32 {
    intrinsic!(|scope| {
        let value = value.read_value(scope);
        let op = Exp2Op::new(scope.ctx_mut(), value);
        scope.register_with_result(&op).into()
    })
}

#[cube]
#[allow(unused_variables)]
fn load_in_place(from: &[u32], at: u32) -> u32 {
    intrinsic!(|scope| {
        let at = at.read_value(scope);
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let op = LoadWordOp::new(scope.ctx_mut(), from, at);
        scope.register_with_result(&op).into()
    })
}

/// Limits registers to as many as let a number of cubes run at once on a multiprocessor.
#[cube]
fn cubes_at_once(#[comptime] cubes: usize) {
    intrinsic!(|scope| {
        let cubes = IndexAttr(cubes);
        scope.register(&CubesAtOnceOp::new(scope.ctx_mut(), cubes));
    })
}

/// Tells the compiler that others may read and write memory: accesses of it before stay before, and
/// those after stay after. CubeCL promises that cubes share nothing that a kernel writes.
#[cube]
#[allow(unused_variables)]
pub(crate) fn publish<T: CubePrimitive>(memory: &mut [T]) {
    intrinsic!(|scope| {
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let memory = unsafe { *memory.__expand_as_ptr_method(scope) }.value(scope);
        scope.register(&PublishOp::new(scope.ctx_mut(), memory));
    })
}

/// Adds 1 to a counter of the device, after all memory that this unit has written or knows to be
/// written. Returns its value before. If it `acquires`, what those have written that counted before
/// is then seen.
#[cube]
#[allow(unused_variables)]
pub(crate) fn arrive(counters: &mut [u32], at: u32, #[comptime] acquires: bool) -> u32 {
    intrinsic!(|scope| {
        let at = at.read_value(scope);
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let counters = unsafe { *counters.__expand_as_ptr_method(scope) }.value(scope);
        let op = ArriveOp::new(scope.ctx_mut(), counters, at, IndexAttr(acquires.into()));
        scope.register_with_result(&op).into()
    })
}

/// Waits until a counter of the device has reached a value. Memory that was written before is then
/// seen.
#[cube]
#[allow(unused_variables)]
pub(crate) fn await_count(counters: &[u32], at: u32, count: u32) {
    intrinsic!(|scope| {
        let (at, count) = (at.read_value(scope), count.read_value(scope));
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let counters = unsafe { *counters.__expand_as_ptr_method(scope) }.value(scope);
        scope.register(&AwaitCountOp::new(scope.ctx_mut(), counters, at, count));
    })
}

/// Loads 16 bytes in their place among other accesses of memory.
#[cube]
#[allow(unused_variables)]
pub(crate) fn load_vector_in_place<T: CubePrimitive>(from: &[T], at: u32, words: &mut Array<u32>) {
    intrinsic!(|scope| {
        let at = at.read_value(scope);
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let words = words.__extract_list(scope);
        scope.register(&LoadVectorOp::new(scope.ctx_mut(), from, at, words));
    })
}

#[cube]
#[allow(unused_variables)]
fn load_shared_words(from: u32, words: &mut Array<u32>, #[comptime] offset: usize) {
    intrinsic!(|scope| {
        let from = from.read_value(scope);
        let words = words.__extract_list(scope);
        let offset = IndexAttr(offset);
        scope.register(&LoadSharedOp::new(scope.ctx_mut(), from, words, offset));
    })
}

#[cube]
#[allow(unused_variables)]
fn shared_address<T: CubePrimitive>(shared: &[T]) -> u32 {
    intrinsic!(|scope| {
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let shared = unsafe { *shared.__expand_as_ptr_method(scope) }.value(scope);
        let op = SharedAddressOp::new(scope.ctx_mut(), shared);
        scope.register_with_result(&op).into()
    })
}

/// Starts to copy `bytes` bytes from device memory to an address of shared memory, unless `wanted`
/// is 0. `at` counts in runs of `bytes`.
#[cube]
#[allow(unused_variables)]
fn copy_async<T: CubePrimitive>(
    wanted: u32,
    to: u32,
    from: &[T],
    at: u32,
    #[comptime] offset: usize,
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        let wanted = wanted.read_value(scope);
        let (to, at) = (to.read_value(scope), at.read_value(scope));
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let (offset, bytes) = (IndexAttr(offset), IndexAttr(bytes));
        let ctx = scope.ctx_mut();
        let copy = CopyAsyncOp::new(ctx, wanted, to, from, at, offset, bytes);
        scope.register(&copy);
    })
}

#[cube]
#[allow(unused_variables)]
fn start_barrier(wanted: u32, barrier: u32) {
    intrinsic!(|scope| {
        let (wanted, barrier) = (wanted.read_value(scope), barrier.read_value(scope));
        scope.register(&StartBarrierOp::new(scope.ctx_mut(), wanted, barrier));
    })
}

/// Starts to copy `bytes` bytes from device memory to an address of shared memory, unless `wanted`
/// is 0. `at` counts in vectors of 16 bytes.
#[cube]
#[allow(unused_variables)]
fn copy_rows_async<T: CubePrimitive>(
    wanted: u32,
    to: u32,
    from: &[T],
    at: u32,
    barrier: u32,
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        let wanted = wanted.read_value(scope);
        let (to, at) = (to.read_value(scope), at.read_value(scope));
        let barrier = barrier.read_value(scope);
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let bytes = IndexAttr(bytes);
        scope.register(&CopyRowsOp::new(scope.ctx_mut(), wanted, to, from, at, barrier, bytes));
    })
}

#[cube]
#[allow(unused_variables)]
fn wait_for_barrier(barrier: u32, parity: u32) {
    intrinsic!(|scope| {
        let (barrier, parity) = (barrier.read_value(scope), parity.read_value(scope));
        scope.register(&WaitForRowsOp::new(scope.ctx_mut(), barrier, parity));
    })
}

/// Prefetches `bytes` bytes of device memory, a multiple of 16, into L2, from byte `at` on, rounded
/// down to 16 bytes.
#[cube]
#[allow(unused_variables)]
pub(crate) fn prefetch_l2<T: CubePrimitive>(from: &[T], at: u32, bytes: u32) {
    intrinsic!(|scope| {
        let (at, bytes) = (at.read_value(scope), bytes.read_value(scope));
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        scope.register(&PrefetchOp::new(scope.ctx_mut(), from, at, bytes));
    })
}

#[cube]
#[allow(unused_variables)]
fn order(#[comptime] text: String) {
    intrinsic!(|scope| {
        let text = StringAttr::new(text);
        scope.register(&OrderOp::new(scope.ctx_mut(), text));
    })
}

#[cube]
#[allow(unused_variables)]
fn multiply_async(
    a: &Array<u32>,
    b: u32,
    sums: &mut Array<f32>,
    #[comptime] columns: usize,
    #[comptime] operand: Operand,
    #[comptime] transposed: bool,
) {
    intrinsic!(|scope| {
        let (a, b) = (a.__extract_list(scope), b.read_value(scope));
        let sums = sums.__extract_list(scope);
        let fits = operand != Operand::E4m3 && columns == 64;
        assert!(!transposed || fits, "a transposed B has 64 columns of 16 bits");
        let kind = match operand {
            Operand::F16 => "k16.f32.f16.f16",
            Operand::Bf16 => "k16.f32.bf16.bf16",
            Operand::E4m3 => "k32.f32.e4m3.e4m3",
        };
        // Add to the sums; neither A nor B is negated; for 16 bits, whether B is transposed.
        let immediates = match operand {
            Operand::E4m3 => "1, 1, 1".to_string(),
            Operand::F16 | Operand::Bf16 => format!("1, 1, 1, {}", u8::from(transposed)),
        };
        let [kind, immediates] = [kind.to_string(), immediates].map(StringAttr::new);
        let columns = IndexAttr(columns);
        scope.register(&MultiplyOp::new(scope.ctx_mut(), a, b, sums, columns, kind, immediates));
    })
}

#[cube]
#[allow(unused_variables)]
fn complete_sums(sums: &mut Array<f32>, #[comptime] count: usize) {
    intrinsic!(|scope| {
        let sums = sums.__extract_list(scope);
        scope.register(&WaitForSumsOp::new(scope.ctx_mut(), sums, IndexAttr(count)));
    })
}

/// CubeCL's matrix instruction of a plane; decoding with instructions of compute capability 9.0.
pub(crate) struct PtxMma;

#[cube]
impl MmaInstructions for PtxMma {
    fn multiply<F: Float>(
        a: &Array<Vector<F, Pair>>,
        b: &Array<Vector<F, Pair>>,
        sums: &mut Array<Vector<f32, Pair>>,
        scratch: &mut [f32],
        #[comptime] from: u32,
    ) {
        PlaneMma::multiply::<F>(a, b, sums, scratch, from);
    }

    fn merge_bits(ones: u32, zeros: u32, #[comptime] mask: u32) -> u32 {
        // Of plain code LLVM makes two masks, as it knows bits of a shifted word: two instructions.
        merge_bits(mask.runtime(), ones, zeros)
    }

    fn scale_pair(
        word: u32,
        #[comptime] pair: u32,
        #[comptime] grid: ScaleGrid,
    ) -> Vector<f32, Pair> {
        if comptime!(grid == ScaleGrid::Float(E4M3)) {
            let halves = widen_e4m3(word & 0x7F7F_7F7Fu32, comptime!(pair as usize));
            let halves = Vector::<f16, Pair>::reinterpret(halves);
            let mut values = Vector::<f32, Pair>::empty();
            values.insert(0usize, f32::cast_from(halves.extract(0usize)));
            values.insert(1usize, f32::cast_from(halves.extract(1usize)));
            values
        } else {
            PlaneMma::scale_pair(word, pair, grid)
        }
    }

    fn sync_plane() {
        PlaneMma::sync_plane();
    }

    fn limit_registers(#[comptime] cubes: u32) {
        cubes_at_once(comptime!(cubes as usize));
    }

    fn any_of_plane(holds: bool, scratch: &mut [f32], #[comptime] from: u32) -> bool {
        PlaneMma::any_of_plane(holds, scratch, from)
    }

    fn sum_of_quad(value: f32, scratch: &mut [f32], #[comptime] from: u32) -> f32 {
        PlaneMma::sum_of_quad(value, scratch, from)
    }
}

/// The instructions of compute capability 9.0.
pub(crate) struct PtxWgmma;

#[cube]
impl WgmmaInstructions for PtxWgmma {
    fn address<T: CubePrimitive>(shared: &[T]) -> u32 {
        shared_address::<T>(shared)
    }

    #[allow(unused_variables)]
    fn copy<T: CubePrimitive>(
        wanted: bool,
        shared: &mut [T],
        address: u32,
        to: u32,
        from: &[T],
        at: u32,
        #[comptime] offset: u32,
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    ) {
        let wanted = u32::cast_from(wanted);
        let (offset, bytes) = comptime!(((offset * bytes) as usize, bytes as usize));
        copy_async::<T>(wanted, address + to * comptime!(bytes as u32), from, at, offset, bytes);
    }

    fn commit_copies() {
        order(comptime!("cp.async.commit_group;".to_string()));
    }

    fn wait_for_copies(#[comptime] groups: u32) {
        order(comptime!(format!("cp.async.wait_group {groups}; fence.proxy.async.shared::cta;")));
    }

    fn wait_for_own_copies(#[comptime] groups: u32) {
        order(comptime!(format!("cp.async.wait_group {groups};")));
    }

    #[allow(unused_variables)]
    fn load_shared<X: Size>(
        shared: &[Vector<u32, X>],
        address: u32,
        at: u32,
        #[comptime] offset: u32,
    ) -> Vector<u32, X> {
        let mut words = Array::<u32>::new(4usize);
        load_shared_words(address + at * 16, &mut words, comptime!(16 * offset as usize));
        let mut vector = Vector::<u32, X>::empty();
        #[unroll]
        for word in 0..4usize {
            vector.insert(word, words[word]);
        }
        vector
    }

    fn start_barriers(address: u32, #[comptime] count: u32) {
        let wanted = u32::cast_from(UNIT_POS == 0u32);
        #[unroll]
        for barrier in 0..count {
            start_barrier(wanted, address + 8 * barrier);
        }
        order(comptime!("fence.mbarrier_init.release.cluster;".to_string()));
        order(comptime!("fence.proxy.async.shared::cta;".to_string()));
    }

    #[allow(unused_variables)]
    fn copy_rows<X: Size>(
        wanted: bool,
        shared: &mut [Vector<u32, X>],
        address: u32,
        to: u32,
        from: &[Vector<u32, X>],
        at: u32,
        barrier: u32,
        #[comptime] each: u32,
    ) {
        let (wanted, to) = (u32::cast_from(wanted), address + to * 16u32);
        copy_rows_async::<Vector<u32, X>>(
            wanted,
            to,
            from,
            at,
            barrier,
            comptime!(16 * each as usize),
        );
    }

    fn wait_for_rows(barrier: u32, parity: u32) {
        wait_for_barrier(barrier, parity);
    }

    fn load_word(from: &[u32], at: u32) -> u32 {
        load_in_place(from, at)
    }

    fn load_vector<W: Size>(from: &[Vector<u32, W>], at: u32) -> Array<u32> {
        let mut words = Array::<u32>::new(4usize);
        load_vector_in_place::<Vector<u32, W>>(from, at, &mut words);
        words
    }

    fn round_to_e4m3(values: &Array<f32>) -> u32 {
        round_bits(
            u32::reinterpret(values[0usize]),
            u32::reinterpret(values[1usize]),
            u32::reinterpret(values[2usize]),
            u32::reinterpret(values[3usize]),
        )
    }

    fn exp2(value: f32) -> f32 {
        approximate_exp2(value)
    }

    fn byte(word: u32, part: u32) -> u32 {
        // A selector of three zeros and the byte.
        permute_bytes(word, 0u32.runtime(), part | 0x4440u32)
    }

    fn select_bytes(low: u32, high: u32, selectors: u32) -> u32 {
        permute_bytes(low, high, selectors)
    }

    #[allow(unused_variables)]
    fn multiply<F: Float, X: Size, W: Size>(
        a: &Array<u32>,
        b: &[Vector<u32, X>],
        address: u32,
        at: u32,
        sums: &mut Array<f32>,
        scratch: &mut [Vector<u32, W>],
        #[comptime] columns: u32,
        #[comptime] operand: Operand,
        #[comptime] transposed: bool,
    ) {
        let columns = comptime!(columns as usize);
        multiply_async(a, address + at * 16u32, sums, columns, operand, transposed);
    }

    fn wait_for_products(#[comptime] groups: u32) {
        order(comptime!(format!("wgmma.wait_group.sync.aligned {groups};")));
    }

    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32) {
        complete_sums(sums, comptime!(count as usize));
    }
}
