//! Methods that improve one block at a time, after coordinate descent has found where to begin.

use super::hessian::Lines;
use super::strip::{STRIP, Strip};
use crate::block::{lowest, top};
use crate::importance::BlockHessian;
use crate::point::{Point, Target};
use crate::{Fp4Scheme, ScaleSearch, admm, joint};

impl<const B: usize> Strip<B> {
    /// The scales and codes of [`admm`](crate::admm) or [`joint`](crate::joint).
    #[inline(always)]
    pub(super) fn search_points(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) {
        let own = self.scales.map(u32::from);
        let units = self.units(scheme, n);
        let mut elements: Lines<B> = [[0.0; STRIP]; B];
        let mut scales = own;
        if scheme.search == ScaleSearch::AdmmPublished {
            self.find_codes(scheme);
        } else {
            (scales, elements) = self.search_coordinate_descent(scheme, hessian, n);
        }
        let operator = admm::Operator::<B>::new(hessian.values);
        for block in (0..n).filter(|&block| units.searchable[block]) {
            let scaled =
                core::array::from_fn(|k| self.values()[k * STRIP + block] * units.factor[block]);
            let base = units.base[block];
            let target = Target { format: scheme.format(), base, scaled, hessian };
            let start = elements.each_ref().map(|line| line[block]);
            let cost = target.cost(scales[block], &start);
            let start = Point { scale: scales[block], elements: start, cost };
            let point = match scheme.search {
                ScaleSearch::AdmmPublished => admm::published(&target, &operator, own[block]),
                ScaleSearch::Admm => admm::improve(&target, &operator, own[block], start),
                _ => {
                    let amax = self.amax[block] * units.factor[block];
                    let format = scheme.format();
                    let all = lowest(format, base)..=top(format, base, amax);
                    joint::improve(&target, all, start)
                }
            };
            scales[block] = point.scale;
            for (line, element) in elements.iter_mut().zip(point.elements) {
                line[block] = element;
            }
        }
        self.take_scales(scheme, &scales);
        self.find_codes(scheme);
        self.take_elements(&elements, &units.searchable);
    }
}
