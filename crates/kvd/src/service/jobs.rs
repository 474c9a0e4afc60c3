//! The daemon's jobs, each beside what prepares it.

pub(crate) use super::attend_job::{Attend, AttendInPlace};
pub(crate) use super::load::Load;
pub(crate) use super::region::{CloseRegion, OpenRegion, ReadRegion, WriteRegion};
pub(crate) use super::register::{Register, Unregister};
pub(crate) use super::store::{Store, StoreInPlace};
