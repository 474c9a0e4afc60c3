//! Linux: memory files, mappings, futexes, and descriptors in messages. All unsafe code is here.

use std::io::{self, ErrorKind};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::Duration;

/// The name in `/proc/<pid>/maps`.
#[cfg(not(miri))]
const NAME: &std::ffi::CStr = c"kvd-region";
/// Descriptors that one message may carry.
pub const DESCRIPTORS_MAX: usize = 2;

/// `Err` with what the last call left in `errno` when it answered a negative number.
fn check_result(answer: i64) -> io::Result<i64> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// A stand-in for a memory file, which Miri does not have; the mapping over it is of memory alone.
#[cfg(miri)]
pub(crate) fn create_file(bytes: u64) -> io::Result<OwnedFd> {
    i64::try_from(bytes).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
    Ok(std::fs::File::open("/dev/null")?.into())
}

/// A new memory file of that size which can no longer change its size.
#[cfg(not(miri))]
pub(crate) fn create_file(bytes: u64) -> io::Result<OwnedFd> {
    let size = i64::try_from(bytes).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name ends with a zero.
    let fd = check_result(unsafe { libc::memfd_create(NAME.as_ptr(), flags) }.into())?;
    // SAFETY: the call gave this descriptor to us alone.
    let file = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: a descriptor of ours and a number.
    check_result(unsafe { libc::ftruncate(file.as_raw_fd(), size) }.into())?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: as above.
    check_result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }.into())?;
    Ok(file)
}

/// Whether a file can never shrink: Miri asks nobody.
#[cfg(miri)]
pub(crate) fn is_sealed(_file: BorrowedFd<'_>) -> bool {
    true
}

/// Whether a file can never shrink; no other kind of file has seals.
#[cfg(not(miri))]
pub(crate) fn is_sealed(file: BorrowedFd<'_>) -> bool {
    // SAFETY: a descriptor that is open while it is borrowed.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Bytes of a stand-in: as many as are mapped.
#[cfg(miri)]
pub(crate) fn file_size(_file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::MAX)
}

/// Bytes of a file.
#[cfg(not(miri))]
pub(crate) fn file_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: all zeros is a value of this plain struct.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the struct is as large as the call expects.
    check_result(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) }.into())?;
    Ok(stat.st_size as u64)
}

/// A file's first bytes in this process, readable and writable.
#[derive(Debug)]
pub(crate) struct FileMapping {
    start: NonNull<AtomicU8>,
    len: usize,
}

// SAFETY: every access is atomic; the mapping is taken away by `Drop` alone.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    pub(crate) fn new(file: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let invalid = || io::Error::from(ErrorKind::InvalidInput);
        let len = usize::try_from(bytes).ok().filter(|len| *len > 0).ok_or_else(invalid)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Miri maps memory without a file behind it, which one mapping alone sees.
        let (flags, file) = match cfg!(miri) {
            true => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            false => (libc::MAP_SHARED, file.as_raw_fd()),
        };
        // SAFETY: the system chooses the address; nothing that exists is replaced.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(invalid)?;
        Ok(Self { start, len })
    }

    pub(crate) fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: mapped with this length until `Drop`, and backed by a file that cannot shrink;
        // whoever else writes there, all accesses of this process are atomic.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; no slice outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A range as aligned words, and the bytes before and behind them.
pub(crate) fn split_words(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    // SAFETY: any bits are an integer, and both types allow shared writing.
    unsafe { bytes.align_to() }
}

/// Four aligned bytes as a word.
pub(crate) fn aligned_word(bytes: &[AtomicU8]) -> Option<&AtomicU32> {
    // SAFETY: as above.
    let (head, words, _) = unsafe { bytes.align_to::<AtomicU32>() };
    if head.is_empty() { words.first() } else { None }
}

/// Wakes everyone who sleeps on a word, in whatever process.
pub(crate) fn wake_waiters(word: &AtomicU32) {
    // SAFETY: the word is mapped; the call takes no other address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Sleeps while the word is `value`; may end early.
pub(crate) fn wait_word(word: &AtomicU32, value: u32, time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    // SAFETY: the word is mapped, and the time lives until the call ends.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const time)
    };
}

/// Room for the descriptors of one message, aligned as its header must be.
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// A message of `bytes`, and its control data when there is any.
fn message_header(bytes: &mut libc::iovec, control: Option<&mut ControlBuffer>) -> libc::msghdr {
    // SAFETY: all zeros is a value of this plain struct.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = bytes;
    header.msg_iovlen = 1;
    if let Some(control) = control {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len() as _;
    }
    header
}

/// Sends bytes over a Unix socket, and descriptors with the first of them.
///
/// # Errors
/// The system's errors, `WouldBlock` included; more descriptors than one message takes.
pub fn send_files(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if files.len() > DESCRIPTORS_MAX {
        return Err(io::Error::from(ErrorKind::InvalidInput));
    }
    let mut control = ControlBuffer([0; 64]);
    let base = bytes.as_ptr().cast_mut().cast();
    let mut vector = libc::iovec { iov_base: base, iov_len: bytes.len() };
    let mut header = message_header(&mut vector, (!files.is_empty()).then_some(&mut control));
    let payload = size_of_val(files) as u32;
    // SAFETY: the control data is larger than two descriptors and aligned for its header; the
    // bytes are only read.
    let sent = unsafe {
        if !files.is_empty() {
            header.msg_controllen = libc::CMSG_SPACE(payload) as _;
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(payload) as _;
            let to = libc::CMSG_DATA(first).cast::<i32>();
            for (at, file) in files.iter().enumerate() {
                to.add(at).write_unaligned(file.as_raw_fd());
            }
        }
        libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
    };
    Ok(check_result(sent as i64)? as usize)
}

/// Receives bytes from a Unix socket, and the descriptors that came with them. 0 bytes is the
/// peer's end.
///
/// # Errors
/// The system's errors, `WouldBlock` included; `InvalidData` for more descriptors than one message
/// takes, which are closed.
pub fn receive_files(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = ControlBuffer([0; 64]);
    let base = bytes.as_mut_ptr().cast();
    let mut vector = libc::iovec { iov_base: base, iov_len: bytes.len() };
    let mut header = message_header(&mut vector, Some(&mut control));
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: both buffers live until the call ends and are as long as the header says.
    let got = unsafe { libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let got = check_result(got as i64)? as usize;
    let mut files = Vec::new();
    // SAFETY: the system wrote whole control messages into the buffer; each descriptor in them is
    // new in this process and ours alone.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(&raw const header);
        while let Some(part) = at.as_ref() {
            if (part.cmsg_level, part.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = part.cmsg_len - libc::CMSG_LEN(0) as usize;
                let from = libc::CMSG_DATA(at).cast::<i32>();
                for index in 0..bytes / size_of::<i32>() {
                    files.push(OwnedFd::from_raw_fd(from.add(index).read_unaligned()));
                }
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
    if files.len() > DESCRIPTORS_MAX || header.msg_flags & libc::MSG_CTRUNC != 0 {
        let message = "more descriptors than a message may carry";
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    Ok((got, files))
}
