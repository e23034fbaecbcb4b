//! Methods that improve one block at a time, by the functions of the reference.

use super::hessian::Lines;
use super::scale_grid::Scales;
use super::strip::{STRIP, Strip};
use crate::importance::BlockHessian;
use crate::reference::point::{Point, Target};

/// Scales and elements of the blocks of a strip.
pub(super) type Points<const B: usize> = ([u32; STRIP], Lines<B>);

/// A method that improves one block at a time. No closure: a function that is not inlined is
/// compiled for any processor, where each fused multiply-add is a call.
pub(super) trait Improve<const B: usize> {
    /// The point that it ends with, given from where to start.
    fn improve(&self, target: &Target<'_, B>, start: Point<B>) -> Point<B>;
}

impl<const B: usize> Strip<B> {
    /// The scales and elements that a method ends with, given from where to start.
    #[inline(always)]
    pub(super) fn improve_points<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        (mut scales, mut elements): Points<B>,
        method: &impl Improve<B>,
    ) -> Points<B> {
        let units = self.units::<FORMAT>(n);
        for block in (0..n).filter(|&block| units.searchable[block]) {
            let target = Target {
                unit: Scales::<FORMAT>::unit(self.amax[block], self.encode[block]),
                own: self.scales[block],
                amax: self.amax[block] * units.factor[block],
                scaled: core::array::from_fn(|k| {
                    self.values()[k * STRIP + block] * units.factor[block]
                }),
                hessian,
            };
            let (scale, start) = (scales[block] as u8, elements.each_ref().map(|line| line[block]));
            let cost = target.cost(scale, &start);
            let point = method.improve(&target, Point { scale, elements: start, cost });
            scales[block] = point.scale.into();
            for (line, element) in elements.iter_mut().zip(point.elements) {
                line[block] = element;
            }
        }
        (scales, elements)
    }
}
