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

pub(crate) fn create_file(_: u64) -> io::Result<OwnedFd> {
    unsupported()
}

pub(crate) fn is_sealed(_: BorrowedFd<'_>) -> bool {
    false
}

pub(crate) fn file_size(_: BorrowedFd<'_>) -> io::Result<u64> {
    unsupported()
}

/// There is none.
#[derive(Debug)]
pub(crate) enum FileMapping {}

impl FileMapping {
    pub(crate) fn new(_: BorrowedFd<'_>, _: u64) -> io::Result<Self> {
        unsupported()
    }

    pub(crate) fn bytes(&self) -> &[AtomicU8] {
        match *self {}
    }
}

pub(crate) fn split_words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    (bytes, &[], &[])
}

pub(crate) fn aligned_word(_: &[AtomicU8]) -> Option<&AtomicU32> {
    None
}

pub(crate) fn wake_waiters(_: &AtomicU32) {}

pub(crate) fn wait_word(_: &AtomicU32, _: u32, _: Duration) {}

/// Sends nothing.
///
/// # Errors
/// Always.
pub fn send_files(_: impl AsFd, _: &[u8], _: &[BorrowedFd<'_>]) -> io::Result<usize> {
    unsupported()
}

/// Receives nothing.
///
/// # Errors
/// Always.
pub fn receive_files(_: impl AsFd, _: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    unsupported()
}
