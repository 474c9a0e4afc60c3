//! Two sides of a region, as processes have them: mappings of their own over one file.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use kvd_shm::{
    CallOutcome, CallRefusal, CompletionRecord, RegionError, RegionMemory, receive_files,
    send_files,
};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First bytes and lengths that are tried: an interpreter takes minutes for more than an edge of a
/// word each.
const PLACES: u64 = if cfg!(miri) { 2 } else { 17 };
const LENGTHS: u8 = if cfg!(miri) { 18 } else { 40 };

/// Both sides of `bytes` bytes, the second mapped from a descriptor that came over a socket. Under
/// Miri, which sends no descriptors, one mapping is both.
fn both(bytes: u64) -> (Arc<RegionMemory>, Arc<RegionMemory>) {
    if cfg!(miri) {
        let memory = Arc::new(RegionMemory::create_memory(bytes).unwrap());
        return (memory.clone(), memory);
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    let memory = RegionMemory::create_memory(bytes).unwrap();
    assert_eq!(send_files(&ours, b"x", &[memory.file()]).unwrap(), 1);
    let mut byte = [0; 8];
    let (got, mut files) = receive_files(&theirs, &mut byte).unwrap();
    assert_eq!((got, files.len(), byte[0]), (1, 1, b'x'));
    let peer = RegionMemory::map_file(files.pop().unwrap(), bytes).unwrap();
    (Arc::new(memory), Arc::new(peer))
}

#[test]
fn bytes_of_any_place_and_length_arrive_and_their_neighbours_stay() {
    let (ours, theirs) = both(4096);
    for offset in 0..PLACES {
        for len in 0..LENGTHS {
            theirs.write_bytes(0, &[0xEE; 64]).unwrap();
            let bytes: Vec<u8> = (1..=len).collect();
            ours.write_bytes(offset, &bytes).unwrap();
            let mut all = [0; 64];
            theirs.read_bytes(0, &mut all).unwrap();
            let end = offset as usize + bytes.len();
            assert_eq!(all[offset as usize..end], bytes, "{offset} {len}");
            let others = all[..offset as usize].iter().chain(&all[end..]);
            assert!(others.into_iter().all(|byte| *byte == 0xEE), "{offset} {len}");
            let mut back = vec![0; bytes.len()];
            theirs.read_bytes(offset, &mut back).unwrap();
            assert_eq!(back, bytes);
        }
    }
}

#[test]
fn accesses_past_the_region_are_refused() {
    let memory = RegionMemory::create_memory(100).unwrap();
    assert_eq!(memory.size_bytes(), 100);
    memory.write_bytes(90, &[1; 10]).unwrap();
    for (offset, bytes) in [(91, 10), (100, 1), (u64::MAX, 1), (u64::MAX - 3, 8), (0, 101)] {
        let error = memory.read_bytes(offset, &mut vec![0; bytes]).unwrap_err();
        let region = 100;
        let wanted = format!("{offset}..{offset}+{bytes} are not inside the region of {region}");
        assert!(error.to_string().contains(&wanted), "{error}");
        memory.write_bytes(offset, &vec![0; bytes]).unwrap_err();
    }
    assert!(matches!(memory.load_word(98), Err(RegionError::OutOfRange { .. })));
    assert!(matches!(memory.load_word(2), Err(RegionError::Unaligned { offset: 2 })));
    assert!(matches!(memory.store_word(5, 1), Err(RegionError::Unaligned { .. })));
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no memory files")]
fn a_file_that_could_shrink_or_is_too_short_is_no_region() {
    let file: OwnedFd = tempfile().into();
    assert!(matches!(RegionMemory::map_file(file, 8), Err(RegionError::NotSealed)));
    let memory = RegionMemory::create_memory(4096).unwrap();
    let file = memory.file().try_clone_to_owned().unwrap();
    let short = RegionMemory::map_file(file, 4097).unwrap_err();
    assert!(matches!(short, RegionError::TooShort { file: 4096, region: 4097 }), "{short}");
    // The peer cannot take pages away under a reader.
    let file = std::fs::File::from(memory.file().try_clone_to_owned().unwrap());
    assert_eq!(file.set_len(1).unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert!(matches!(RegionMemory::create_memory(0), Err(RegionError::System { .. })));
}

/// A file of the file system.
fn tempfile() -> std::fs::File {
    let path = std::env::temp_dir().join(format!("kvd-shm-{}", std::process::id()));
    let file = std::fs::File::create_new(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(4096).unwrap();
    file
}

#[test]
fn a_sleeper_wakes_when_the_call_ends_and_finds_the_answer() {
    let (ours, theirs) = both(4096);
    let record = CompletionRecord::from_offset(&ours, 512).unwrap();
    record.clear().unwrap();
    assert_eq!(record.wait_end(Duration::from_millis(1)).unwrap(), None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            theirs.write_bytes(1024, &[7; 100]).unwrap();
            let record = CompletionRecord::from_offset(&theirs, 512).unwrap();
            record.end_call(&CallOutcome::Done([1, 2, 3])).unwrap();
        });
        let began = Instant::now();
        let outcome = record.wait_end(Duration::from_secs(60)).unwrap();
        assert!(began.elapsed() < Duration::from_secs(30), "slept on");
        assert_eq!(outcome, Some(CallOutcome::Done([1, 2, 3])));
        let mut answer = [0; 100];
        ours.read_bytes(1024, &mut answer).unwrap();
        assert_eq!(answer, [7; 100]);
    });
}

#[test]
fn a_refusal_is_cut_at_a_character_and_never_leaves_its_record() {
    let memory = RegionMemory::create_memory(4096).unwrap();
    memory.write_bytes(256, &[0xAB; 8]).unwrap();
    let record = CompletionRecord::from_offset(&memory, 0).unwrap();
    let text = format!("INTERNAL: {}", "é".repeat(300));
    let refusal = CallRefusal { text, retry_after_ms: 20, id_boot: 0x0a0b_0c0d, error_bytes: 7 };
    record.end_call(&CallOutcome::Refused(refusal.clone())).unwrap();
    let Some(CallOutcome::Refused(read)) = record.wait_end(Duration::ZERO).unwrap() else {
        panic!()
    };
    let text = read.text.clone();
    assert_eq!(CallRefusal { text: refusal.text.clone(), ..read }, refusal);
    assert!(text.starts_with("INTERNAL: éé") && text.len() <= 232, "{text}");
    assert!(text.ends_with('é'), "{text}");
    let mut after = [0; 8];
    memory.read_bytes(256, &mut after).unwrap();
    assert_eq!(after, [0xAB; 8]);
    // A length that a hostile peer writes is cut as well.
    memory.write_bytes(4, &u32::MAX.to_le_bytes()).unwrap();
    let Some(CallOutcome::Refused(read)) = record.wait_end(Duration::ZERO).unwrap() else {
        panic!()
    };
    assert!(read.text.starts_with("INTERNAL"), "{}", read.text);
}

#[test]
#[cfg_attr(miri, ignore = "Miri sends no descriptors")]
fn descriptors_are_limited_and_those_over_the_limit_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let memory = RegionMemory::create_memory(64).unwrap();
    let three = [memory.file(); 3];
    assert_eq!(send_files(&ours, b"x", &three).unwrap_err().kind(), ErrorKind::InvalidInput);
    send_files(&ours, b"xy", &three[..2]).unwrap();
    let mut bytes = [0; 8];
    let (got, files) = receive_files(&theirs, &mut bytes).unwrap();
    assert_eq!((got, files.len()), (2, 2));
    drop(ours);
    assert_eq!(receive_files(theirs.as_fd(), &mut bytes).unwrap().0, 0);
}
