//! Tests of the store as a whole: rules one by one, random operations against a naive model, and
//! threads.

mod append;
mod arriving;
mod cache_model;
mod cache_threads;
mod chunks;
mod disk;
mod events;
mod forks;
mod harness;
mod model;
mod prefixes;
mod quotas;
mod rules;
mod sessions;
mod shares;
mod threads;
