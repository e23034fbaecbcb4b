//! Where the values and blocks of a unit lie, and how they come and go.

pub(crate) mod place;
pub(crate) mod share;
pub(crate) mod stage;
pub(crate) mod tile;
