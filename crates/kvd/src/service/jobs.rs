//! The daemon's jobs, each beside what prepares it.

pub(crate) use super::attend_job::{AttendInPlace, AttendJob};
pub(crate) use super::load::LoadJob;
pub(crate) use super::publish::PublishJob;
pub(crate) use super::region::{CloseRegion, OpenRegion, ReadRegion, WriteRegion};
pub(crate) use super::register::{RegisterJob, UnregisterJob};
pub(crate) use super::step::{LoadStepJob, StoreStepJob};
pub(crate) use super::store::{StoreInPlace, StoreJob};
pub(crate) use super::tiers::{ExportJob, FillJob, ImportJob};
