//! Methods that improve one block at a time, by the functions of the reference.

use super::hessian::Lines;
use super::scale_grid::Scales;
use super::strip::{STRIP, Strip};
use crate::importance::BlockHessian;
use crate::reference::point::{Point, Target};

/// Scales and elements of the blocks of a strip.
pub(super) type Points<const B: usize> = ([u32; STRIP], Lines<B>);

impl<const B: usize> Strip<B> {
    /// The scales and elements that `improve` ends with, given from where to start.
    #[inline(always)]
    pub(super) fn improve_points<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        (mut scales, mut elements): Points<B>,
        improve: impl Fn(&Target<'_, B>, Point<B>) -> Point<B>,
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
            let point = improve(&target, Point { scale, elements: start, cost });
            scales[block] = point.scale.into();
            for (line, element) in elements.iter_mut().zip(point.elements) {
                line[block] = element;
            }
        }
        (scales, elements)
    }
}
