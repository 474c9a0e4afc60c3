//! The functions of `kvd.h`.

use crate::args::{
    AttendArgs, ConnectArgs, ModelArgs, QueryArgs, StoreArgs, check_place, given_number, read_list,
    read_sized, read_text, write_answer,
};
use crate::connection::{ConnectPlan, OpenConnection};
use crate::failure::{CallFailure, FailedCall, OK};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// `kvd_connection`.
pub struct LockedConnection {
    connection: Mutex<OpenConnection>,
    /// Whether a call has not come to its end: what it left is not known.
    is_broken: AtomicBool,
}

/// Looks for an end so many microseconds where nothing else is said.
const SPIN_US: u32 = 100;
const ENTRIES: u32 = 64;
const QUERIES_MAX: u32 = 64;
const MEMORY_BYTES: u64 = 16 << 20;

/// Runs a call: its code, after it has written why it failed.
///
/// # Safety
/// `error` is null, or a place for one.
unsafe fn run_call(error: *mut CallFailure, call: impl FnOnce() -> Result<(), FailedCall>) -> i32 {
    let ended = catch_unwind(AssertUnwindSafe(call));
    let failure = match ended {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => failure,
        Err(panic) => FailedCall::of_panic(panic.as_ref()),
    };
    // SAFETY: as the caller promises.
    unsafe { write_answer(error, failure.to_record()) }
    failure.code
}

/// Runs a call with a connection that no other thread is using.
///
/// # Safety
/// As [`run_call`]; `connection` is null, or of [`kvd_connect`] and not disconnected.
unsafe fn run_with(
    connection: *const LockedConnection,
    error: *mut CallFailure,
    call: impl FnOnce(&mut OpenConnection) -> Result<(), FailedCall>,
) -> i32 {
    // SAFETY: as the caller promises.
    let connection = unsafe { connection.as_ref() };
    let locked = || {
        let connection =
            connection.ok_or_else(|| FailedCall::invalid_argument("connection is NULL"))?;
        let Some(mut locked) = connection.connection.try_lock() else {
            let message = "another thread is in a call of this connection";
            return Err(FailedCall::invalid_argument(message));
        };
        if connection.is_broken.swap(true, Ordering::Relaxed) {
            return Err(FailedCall::of_panic(&"an earlier call has failed inside; connect again"));
        }
        let result = call(&mut locked);
        connection.is_broken.store(false, Ordering::Relaxed);
        result
    };
    // SAFETY: as the caller promises.
    unsafe { run_call(error, locked) }
}

/// A number, or another one in place of 0.
fn or_default<T: PartialEq + Default>(number: T, default: T) -> T {
    if number == T::default() { default } else { number }
}

/// See `kvd.h`.
#[unsafe(no_mangle)]
pub extern "C" fn kvd_abi_version() -> u32 {
    crate::ABI_VERSION
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_connect(
    options: *const ConnectArgs,
    connection: *mut *mut LockedConnection,
    error: *mut CallFailure,
) -> i32 {
    let call = || {
        check_place(connection, "connection")?;
        // SAFETY: tested above, and a place for one as the caller promises. NULL after a failure.
        unsafe { connection.write(std::ptr::null_mut()) };
        // SAFETY: as the caller promises.
        let args = unsafe { read_sized(options)? };
        // SAFETY: the same.
        let (path, namespace, session) = unsafe {
            (
                read_text(args.region_path, "kvd_options.region_path")?,
                read_text(args.name_space, "kvd_options.name_space")?,
                read_text(args.session, "kvd_options.session")?,
            )
        };
        let plan = ConnectPlan {
            path: path
                .ok_or_else(|| FailedCall::invalid_argument("kvd_options.region_path is NULL"))?,
            namespace,
            session,
            entries: or_default(args.ring_entries, ENTRIES),
            queries_max: or_default(args.queries_max, QUERIES_MAX),
            memory_bytes: or_default(args.memory_bytes, MEMORY_BYTES),
            timeout_us: args.timeout_us,
            spin_us: or_default(args.spin_us, SPIN_US),
        };
        let opened = Box::new(LockedConnection {
            connection: Mutex::new(plan.open_connection()?),
            is_broken: AtomicBool::new(false),
        });
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(connection, Box::into_raw(opened)) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_call(error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// `connection` is null, or of [`kvd_connect`], and used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_disconnect(connection: *mut LockedConnection) {
    if connection.is_null() {
        return;
    }
    // SAFETY: it came from a box, and nobody else has it.
    let connection = unsafe { Box::from_raw(connection) };
    // There is nobody to tell of a defect.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(connection)));
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_memory(
    connection: *const LockedConnection,
    bytes: *mut u64,
) -> *mut c_void {
    let mut start = std::ptr::null_mut();
    let call = |connection: &mut OpenConnection| {
        check_place(bytes, "bytes")?;
        start = connection.memory_start().cast();
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(bytes, connection.memory_bytes()) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, std::ptr::null_mut(), call) };
    start
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_register_model(
    connection: *mut LockedConnection,
    model: *const ModelArgs,
    id: *mut u64,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        check_place(id, "id")?;
        // SAFETY: as the caller promises.
        let spec = unsafe { read_sized(model)?.to_spec()? };
        let registered = connection.register_model(spec)?;
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(id, registered) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_open_sequence(
    connection: *mut LockedConnection,
    model: u64,
    sequence: *mut u64,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        check_place(sequence, "sequence")?;
        let opened = connection.open_sequence(model)?;
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(sequence, opened) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_fork_sequence(
    connection: *mut LockedConnection,
    sequence: u64,
    length: u32,
    fork: *mut u64,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        check_place(fork, "fork")?;
        let forked = connection.fork_sequence(sequence, given_number(length))?;
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(fork, forked) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_truncate_sequence(
    connection: *mut LockedConnection,
    sequence: u64,
    length: u32,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| connection.truncate_sequence(sequence, length);
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_sequence_length(
    connection: *mut LockedConnection,
    sequence: u64,
    length: *mut u32,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        check_place(length, "length")?;
        let tokens = connection.sequence_length(sequence)?;
        // SAFETY: tested above, and a place for one as the caller promises.
        unsafe { write_answer(length, tokens) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_close_sequence(
    connection: *mut LockedConnection,
    sequence: u64,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| connection.close_sequence(sequence);
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_store(
    connection: *mut LockedConnection,
    rows: *const StoreArgs,
    length: *mut u32,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        // SAFETY: as the caller promises.
        let rows = unsafe { read_sized(rows)? };
        let stored = connection.store_rows(&rows)?;
        // SAFETY: null, or a place for one as the caller promises.
        unsafe { write_answer(length, stored) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// An attend and its queries.
struct ReadBatch<'a> {
    args: AttendArgs,
    queries: &'a [QueryArgs],
}

/// Reads an attend.
///
/// # Safety
/// As [`read_sized`], and [`read_list`] of its queries.
unsafe fn read_batch<'a>(batch: *const AttendArgs) -> Result<ReadBatch<'a>, FailedCall> {
    // SAFETY: as the caller promises.
    let args = unsafe { read_sized(batch)? };
    let count = usize::try_from(args.query_count).unwrap_or(usize::MAX);
    if count > kvd_client::AttendBatch::QUERIES_MAX {
        let most = kvd_client::AttendBatch::QUERIES_MAX;
        return Err(FailedCall::invalid_argument(format!(
            "query_count is {count}; it is up to {most}"
        )));
    }
    // SAFETY: as the caller promises.
    let queries = unsafe { read_list(args.queries, count, "kvd_attend_batch.queries")? };
    Ok(ReadBatch { args, queries })
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_attend(
    connection: *mut LockedConnection,
    batch: *const AttendArgs,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        // SAFETY: as the caller promises.
        let ReadBatch { args, queries } = unsafe { read_batch(batch)? };
        connection.attend_once(&args, queries)
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_submit_attend(
    connection: *mut LockedConnection,
    batch: *const AttendArgs,
    tag: u64,
    error: *mut CallFailure,
) -> i32 {
    let call = |connection: &mut OpenConnection| {
        // SAFETY: as the caller promises.
        let ReadBatch { args, queries } = unsafe { read_batch(batch)? };
        connection.submit_tagged(tag, &args, queries)
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

/// See `kvd.h`.
///
/// # Safety
/// Pointers are null, or as `kvd.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvd_wait_attend(
    connection: *mut LockedConnection,
    tag: *mut u64,
    ended: *mut u32,
    error: *mut CallFailure,
) -> i32 {
    // SAFETY: null, or a place for one as the caller promises.
    unsafe { write_answer(ended, 0) };
    let call = |connection: &mut OpenConnection| {
        check_place(tag, "tag")?;
        let end = connection.wait_tagged()?;
        // SAFETY: tested above or null, and places for one as the caller promises.
        unsafe {
            write_answer(tag, end.tag);
            write_answer(ended, 1);
        }
        end.result
    };
    // SAFETY: as the caller promises.
    unsafe { run_with(connection, error, call) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code_with_its_text() {
        let mut why = FailedCall::invalid_argument("").to_record();
        // SAFETY: a place for one.
        let code = unsafe { run_call(&raw mut why, || panic!("a defect")) };
        assert_eq!((code, why.code), (29, 29));
        assert!(why.message.starts_with(b"a defect in this library: a defect\0"));
    }
}
