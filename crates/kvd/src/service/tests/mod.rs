//! The service over a small CPU device that can be held, watched and made to fail.

mod bench;
mod by_caller;
mod devices;
mod failure;
mod floods;
mod ids;
mod limits;
mod merged;
mod models;
mod packing;
mod publish;
mod queries;
mod sessions;
mod shares;
mod sliced_stores;
mod tiers;
mod unregister;
