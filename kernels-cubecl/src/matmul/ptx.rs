//! Instructions of Hopper as operations of our own; the only file with PTX.
//!
//! CubeCL's compiler has neither asynchronous copies nor the matrix instructions of a warpgroup.
//! The operations here are lowered to inline assembly instead. `instructions.rs` defines them;
//! [`prefetch_l2`] is for `prefetch.rs`.
//!
//! The descriptor of B has 64 bits, with addresses and distances in units of 16 bytes:
//!
//! ```text
//! bit 0     the address of its first row
//!     16    1, not used by this swizzle
//!     32    64: from eight rows to the next eight
//!     62    1: vectors of 16 bytes are swizzled within 128
//! ```

use cubecl::prelude::*;
use cubecl_ir::attributes::{BoolAttr, IndexAttr};
use cubecl_ir::{CanMaterialize, HasSideEffects, Pure, prelude::*};
use cubecl_llvm::shared::to_llvm::ToLLVMDialect;
use pliron::builtin::attributes::StringAttr;
use pliron::builtin::types::{FP32Type, IntegerType, Signedness};
use pliron::r#type::TypeHandle;
use pliron::value::Value;
use pliron_llvm::ops as llvm;
use pliron_llvm::types::{StructLayout, StructType, VoidType};

use super::instructions::WgmmaInstructions;

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

/// Loads the values at an address. Returns the pointers and the values.
fn load_all(
    ctx: &mut Context,
    rewriter: &mut DialectConversionRewriter,
    from: Value,
    of: TypeHandle,
    count: usize,
) -> (Vec<Value>, Vec<Value>) {
    let (mut pointers, mut values) = (Vec::new(), Vec::new());
    for index in 0..count {
        let index = llvm::GepIndex::Constant(index as u32);
        let pointer = llvm::GetElementPtrOp::new(ctx, from, vec![index], of);
        rewriter.insert_op(ctx, &pointer);
        let pointer = pointer.get_result(ctx);
        let value = llvm::LoadOp::new(ctx, pointer, of);
        rewriter.insert_op(ctx, &value);
        pointers.push(pointer);
        values.push(value.get_result(ctx));
    }
    (pointers, values)
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
    for (index, pointer) in pointers.into_iter().enumerate() {
        let value = llvm::ExtractValueOp::new(ctx, changed, vec![index as u32]).expect("a sum");
        rewriter.insert_op(ctx, &value);
        let store = llvm::StoreOp::new(ctx, value.get_result(ctx), pointer);
        rewriter.insert_op(ctx, &store);
    }
}

#[cube_op(name = "fp4.take_byte")]
#[result_ty(same_as = word)]
#[op_traits(CanMaterialize, Pure)]
struct TakeByteOp {
    word: Value,
    selector: Value,
}

#[op_interface_impl]
impl ToLLVMDialect for TakeByteOp {
    fn rewrite(
        &self,
        ctx: &mut Context,
        rewriter: &mut DialectConversionRewriter,
        _operands_info: &OperandsInfo,
    ) -> Result<()> {
        let (word, selector) = (self.word(ctx), self.selector(ctx));
        let ty = word_type(ctx);
        let text = "prmt.b32 $0, $1, 0, $2;";
        let op = llvm::InlineAsmOp::new(ctx, ty, vec![word, selector], text, "=r,r,r", false);
        rewriter.insert_op(ctx, &op);
        let byte = op.get_result(ctx);
        rewriter.replace_operation_with_values(ctx, self.get_operation(), vec![byte]);
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
        let bytes = self.bytes(ctx).0;
        // Only copies of 16 bytes can bypass L1.
        let cache = if bytes == 16 { "cg" } else { "ca" };
        let text = format!(
            "{{ .reg .pred p; .reg .b64 from; setp.ne.u32 p, $3, 0; \
             mad.wide.u32 from, $2, {bytes}, $1; \
             @p cp.async.{cache}.shared.global [$0], [from], {bytes}; }}"
        );
        let inputs = vec![self.to(ctx), self.from(ctx), self.at(ctx), self.wanted(ctx)];
        let void = VoidType::get(ctx).into();
        assembly(ctx, rewriter, void, inputs, &text, "r,l,r,r,~{memory}");
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
    bf16: BoolAttr,
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
        let half = if self.bf16(ctx).0 { "bf16" } else { "f16" };
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
             wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} \
             {{{}}}, {{{}}}, b, 1, 1, 1, 0; wgmma.commit_group.sync.aligned; }}",
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

#[cube]
#[allow(unused_variables)]
fn take_byte(word: u32, selector: u32) -> u32 {
    intrinsic!(|scope| {
        let (word, selector) = (word.read_value(scope), selector.read_value(scope));
        let op = TakeByteOp::new(scope.ctx_mut(), word, selector);
        scope.register_with_result(&op).into()
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
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        let wanted = wanted.read_value(scope);
        let (to, at) = (to.read_value(scope), at.read_value(scope));
        // SAFETY: the pointer is to a value that the scope has just made, and keeps.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let bytes = IndexAttr(bytes);
        scope.register(&CopyAsyncOp::new(scope.ctx_mut(), wanted, to, from, at, bytes));
    })
}

/// Prefetches `bytes` bytes of device memory, a multiple of 16, into L2, from byte `at` on, rounded
/// down to 16 bytes.
#[cube]
#[allow(unused_variables)]
pub(super) fn prefetch_l2<T: CubePrimitive>(from: &[T], at: u32, bytes: u32) {
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
    #[comptime] bf16: bool,
) {
    intrinsic!(|scope| {
        let (a, b) = (a.__extract_list(scope), b.read_value(scope));
        let sums = sums.__extract_list(scope);
        let (columns, bf16) = (IndexAttr(columns), BoolAttr(bf16));
        scope.register(&MultiplyOp::new(scope.ctx_mut(), a, b, sums, columns, bf16));
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

/// The instructions of compute capability 9.0.
pub(super) struct PtxWgmma;

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
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    ) {
        let wanted = u32::cast_from(wanted);
        copy_async::<T>(wanted, address + to * bytes, from, at, comptime!(bytes as usize));
    }

    fn commit_copies() {
        order(comptime!("cp.async.commit_group;".to_string()));
    }

    fn wait_for_copies(#[comptime] groups: u32) {
        order(comptime!(format!("cp.async.wait_group {groups}; fence.proxy.async.shared::cta;")));
    }

    fn byte(word: u32, part: u32) -> u32 {
        // A selector of three zeros and the byte.
        take_byte(word, part | 0x4440u32)
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
        #[comptime] bf16: bool,
    ) {
        multiply_async(a, address + at * 16u32, sums, comptime!(columns as usize), bf16);
    }

    fn wait_for_products(#[comptime] groups: u32) {
        order(comptime!(format!("wgmma.wait_group.sync.aligned {groups};")));
    }

    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32) {
        complete_sums(sums, comptime!(count as usize));
    }
}
