//! A mapped region, and accesses that stay inside it.

use crate::linux::{self, FileMapping};
use kvd_core::{Coded, ErrorCode};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Why memory cannot be shared, or an access was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// An access past the region.
    #[error("bytes {offset}..{offset}+{bytes} are not inside the region of {region} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// A word that is not aligned.
    #[error("the word at {offset} is not aligned to 4 bytes")]
    Unaligned {
        /// Where.
        offset: u64,
    },
    /// The file could shrink under a reader.
    #[error("the file can shrink: a region is a memory file with F_SEAL_SHRINK")]
    NotSealed,
    /// The file is shorter than was said.
    #[error("the file has {file} bytes, fewer than the region's {region}")]
    TooShort {
        /// Bytes of the file.
        file: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// Which call.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl Coded for RegionError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::System { .. } => ErrorCode::LimitExceeded,
            _ => ErrorCode::InvalidArgument,
        }
    }
}

/// A mapped memory file.
#[derive(Debug)]
pub struct RegionMemory {
    mapping: FileMapping,
    file: OwnedFd,
}

impl RegionMemory {
    /// New memory of `bytes` zeros, sealed: it can be handed over as it is.
    ///
    /// # Errors
    /// When the system gives none.
    pub fn create_memory(bytes: u64) -> Result<Self, RegionError> {
        let file = linux::create_file(bytes).map_err(system_error("memfd_create"))?;
        Self::map_file(file, bytes)
    }

    /// Memory that a peer handed over.
    ///
    /// # Errors
    /// When it could shrink, is shorter than `bytes`, or cannot be mapped.
    pub fn map_file(file: OwnedFd, bytes: u64) -> Result<Self, RegionError> {
        if !linux::is_sealed(file.as_fd()) {
            return Err(RegionError::NotSealed);
        }
        let size = linux::file_size(file.as_fd()).map_err(system_error("fstat"))?;
        if size < bytes {
            return Err(RegionError::TooShort { file: size, region: bytes });
        }
        let mapping = FileMapping::new(file.as_fd(), bytes).map_err(system_error("mmap"))?;
        Ok(Self { mapping, file })
    }

    /// Its bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.mapping.bytes().len() as u64
    }

    /// Where it begins in this process, for callers of other languages; the mapping ends with this.
    /// The peer may write there at any time.
    #[must_use]
    pub fn start_address(&self) -> *mut u8 {
        self.mapping.bytes().as_ptr().cast_mut().cast()
    }

    /// The memory file, which a peer maps.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Tests that a range lies inside.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`].
    pub fn check_range(&self, offset: u64, bytes: u64) -> Result<(), RegionError> {
        self.byte_range(offset, bytes).map(|_| ())
    }

    fn byte_range(&self, offset: u64, bytes: u64) -> Result<&[AtomicU8], RegionError> {
        let region = self.size_bytes();
        match offset.checked_add(bytes) {
            Some(end) if end <= region => Ok(&self.mapping.bytes()[offset as usize..end as usize]),
            _ => Err(RegionError::OutOfRange { offset, bytes, region }),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`].
    pub fn read_bytes(&self, offset: u64, to: &mut [u8]) -> Result<(), RegionError> {
        let from = self.byte_range(offset, to.len() as u64)?;
        let (head, words, _) = split_words(from);
        let (first, rest) = to.split_at_mut(head.len());
        for (to, from) in first.iter_mut().zip(head) {
            *to = from.load(Ordering::Relaxed);
        }
        let (whole, last) = rest.split_at_mut(8 * words.len());
        for (to, from) in whole.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = from.load(Ordering::Relaxed).to_ne_bytes();
        }
        let tail = &from[from.len() - last.len()..];
        for (to, from) in last.iter_mut().zip(tail) {
            *to = from.load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`RegionError::OutOfRange`].
    pub fn write_bytes(&self, offset: u64, from: &[u8]) -> Result<(), RegionError> {
        let to = self.byte_range(offset, from.len() as u64)?;
        let (head, words, tail) = split_words(to);
        let (first, rest) = from.split_at(head.len());
        for (to, from) in head.iter().zip(first) {
            to.store(*from, Ordering::Relaxed);
        }
        let (whole, last) = rest.split_at(8 * words.len());
        for (to, from) in words.iter().zip(whole.as_chunks::<8>().0) {
            to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
        }
        for (to, from) in tail.iter().zip(last) {
            to.store(*from, Ordering::Relaxed);
        }
        Ok(())
    }

    fn word_cell(&self, offset: u64) -> Result<&AtomicU32, RegionError> {
        let bytes = self.byte_range(offset, 4)?;
        linux::aligned_word(bytes).ok_or(RegionError::Unaligned { offset })
    }

    /// Reads a word; what its writer wrote before it is there, too.
    ///
    /// # Errors
    /// Past the region, or not aligned.
    pub fn load_word(&self, offset: u64) -> Result<u32, RegionError> {
        Ok(self.word_cell(offset)?.load(Ordering::Acquire))
    }

    /// Writes a word after everything written so far, and wakes who sleeps on it.
    ///
    /// # Errors
    /// Past the region, or not aligned.
    pub fn store_word(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        let word = self.word_cell(offset)?;
        word.store(value, Ordering::Release);
        linux::wake_waiters(word);
        Ok(())
    }

    /// Reads a word, in one order with all ordered accesses of both sides.
    pub(crate) fn read_ordered(&self, offset: u64) -> Result<u32, RegionError> {
        Ok(self.word_cell(offset)?.load(Ordering::SeqCst))
    }

    /// Writes a word in that order, after everything written so far; wakes nobody.
    pub(crate) fn write_ordered(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        self.word_cell(offset)?.store(value, Ordering::SeqCst);
        Ok(())
    }

    /// Wakes who sleeps on a word.
    pub(crate) fn wake_sleepers(&self, offset: u64) -> Result<(), RegionError> {
        linux::wake_waiters(self.word_cell(offset)?);
        Ok(())
    }

    /// Sleeps until the word is no longer `value`, at most `time`; returns its value then.
    ///
    /// # Errors
    /// Past the region, or not aligned.
    pub fn wait_word(&self, offset: u64, value: u32, time: Duration) -> Result<u32, RegionError> {
        let word = self.word_cell(offset)?;
        let now = word.load(Ordering::Acquire);
        if now != value {
            return Ok(now);
        }
        linux::wait_word(word, value, time);
        Ok(word.load(Ordering::Acquire))
    }
}

fn system_error(what: &'static str) -> impl FnOnce(io::Error) -> RegionError {
    move |source| RegionError::System { what, source }
}

/// A range as aligned words, and the bytes before and behind them.
fn split_words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    linux::split_words(bytes)
}
