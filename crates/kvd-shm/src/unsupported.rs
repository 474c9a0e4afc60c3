//! Systems without memory files: nothing can be shared, and nothing pretends to be.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

/// Descriptors that one message may carry.
pub const DESCRIPTORS_MAX: usize = 2;

fn unsupported<T>() -> io::Result<T> {
    Err(io::Error::new(ErrorKind::Unsupported, "regions need Linux"))
}

pub(crate) fn create(_: u64) -> io::Result<OwnedFd> {
    unsupported()
}

pub(crate) fn is_sealed(_: BorrowedFd<'_>) -> bool {
    false
}

pub(crate) fn size(_: BorrowedFd<'_>) -> io::Result<u64> {
    unsupported()
}

/// There is none.
#[derive(Debug)]
pub(crate) enum Mapping {}

impl Mapping {
    pub(crate) fn new(_: BorrowedFd<'_>, _: u64) -> io::Result<Self> {
        unsupported()
    }

    pub(crate) fn bytes(&self) -> &[AtomicU8] {
        match *self {}
    }
}

pub(crate) fn words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    (bytes, &[], &[])
}

pub(crate) fn word(_: &[AtomicU8]) -> Option<&AtomicU32> {
    None
}

pub(crate) fn wake(_: &AtomicU32) {}

pub(crate) fn wait(_: &AtomicU32, _: u32, _: Duration) {}

/// Sends nothing.
///
/// # Errors
/// Always.
pub fn send(_: impl AsFd, _: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<usize> {
    unsupported()
}

/// Receives nothing.
///
/// # Errors
/// Always.
pub fn receive(_: impl AsFd, _: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    unsupported()
}
