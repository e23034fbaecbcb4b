//! A write that is planned, and what is known of it.

use std::fmt;

use super::plan::PlannedFiles;
use super::report::WriteReport;
use super::target::Target;
use crate::weight::Model;

/// A write of which everything is known but the numbers: nothing is on the disk yet.
pub struct Planned<'m> {
    pub(super) model: &'m Model<'m>,
    pub(super) target: Target,
    pub(super) plan: PlannedFiles,
}

impl fmt::Debug for Planned<'_> {
    /// The dialect, and what will be written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Planned")
            .field("dialect", &self.target.dialect.name())
            .field("report", &self.plan.report)
            .finish_non_exhaustive()
    }
}

impl Planned<'_> {
    /// What will be written, and what changes on the way as far as the model tells now.
    pub fn report(&self) -> WriteReport {
        self.plan.report
    }

    /// Bytes of all files with tensors, headers included.
    pub fn length(&self) -> u64 {
        self.plan.files.iter().map(|file| file.length).sum()
    }

    /// Bytes that each weight takes with all of its tensors.
    pub fn bytes(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.model.weights.len()];
        for file in &self.plan.files {
            for (&at, places) in file.weights.iter().zip(&file.places) {
                bytes[at] = places.iter().map(|(_, bytes)| bytes).sum();
            }
        }
        bytes
    }
}
