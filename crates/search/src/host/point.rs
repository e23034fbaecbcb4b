//! Methods that improve one block at a time, by the functions of the reference, after coordinate
//! descent has found where to begin.

use super::hessian::Lines;
use super::scale_grid::Scales;
use super::strip::{STRIP, Strip};
use crate::Fp4Scheme;
use crate::importance::BlockHessian;
use crate::reference::point::{Point, Target};

/// From where a block is improved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// From the scale and codes that coordinate descent ends with.
    CoordinateDescent,
    /// From the rule's scale alone.
    Rule,
}

impl<const B: usize> Strip<B> {
    /// Takes the scales and codes that `improve` ends with.
    #[inline(always)]
    pub(super) fn improve_points<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Start,
        improve: impl Fn(&Target<'_, B>, Point<B>) -> Point<B>,
    ) {
        let own = self.scales;
        let units = self.units::<FORMAT>(n);
        let (mut scales, mut elements): ([u32; STRIP], Lines<B>) = match start {
            Start::CoordinateDescent => {
                self.search_coordinate_descent::<FORMAT>(scheme, hessian, n)
            }
            Start::Rule => (own.map(u32::from), [[0.0; STRIP]; B]),
        };
        for block in (0..n).filter(|&block| units.searchable[block]) {
            let target = Target {
                unit: Scales::<FORMAT>::unit(self.amax[block], self.encode[block]),
                own: own[block],
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
        self.take_scales::<FORMAT>(scheme.rule, &scales);
        self.find_codes(scheme);
        self.take_elements(&elements, &units.searchable);
    }
}
