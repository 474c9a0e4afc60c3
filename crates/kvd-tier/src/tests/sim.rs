//! A folder in memory that keeps what is not synced apart, sector by sector, and at a crash keeps,
//! drops, swaps or spoils any of it.

use crate::files::{OpenPurpose, StoredFile, StoredFolder};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

const SECTOR_BYTES: usize = 512;

/// xorshift64*: small, fast, and the same on each machine.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66_D1CE_4E5B | 1)
    }

    pub(super) fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next_u64() >> 33) as usize % end.max(1)
    }

    pub(super) fn is_one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// How often calls fail; 0 is never, `n` is one in `n`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) write: usize,
    pub(super) sync: usize,
    pub(super) create_full: usize,
    pub(super) read: usize,
}

#[derive(Debug)]
struct SimFile {
    current: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
    is_sync_failed: bool,
}

#[derive(Clone, Debug)]
enum NameChange {
    Created(String),
    Removed(String, Arc<Mutex<SimFile>>),
}

#[derive(Debug)]
struct SimState {
    files: BTreeMap<String, Arc<Mutex<SimFile>>>,
    changes: Vec<NameChange>,
    small: BTreeMap<String, Vec<u8>>,
    random: Random,
    faults: Faults,
    // Changes until the power fails.
    fuse: Option<u64>,
    capacity: u64,
    syncs_to_fail: u32,
    violations: Vec<String>,
}

/// The folder.
#[derive(Clone, Debug)]
pub(super) struct SimFolder {
    state: Arc<Mutex<SimState>>,
}

impl SimFolder {
    pub(super) fn new(seed: u64) -> Self {
        let state = SimState {
            files: BTreeMap::new(),
            changes: Vec::new(),
            small: BTreeMap::new(),
            random: Random::new(seed),
            faults: Faults::default(),
            fuse: None,
            capacity: u64::MAX,
            syncs_to_fail: 0,
            violations: Vec::new(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    pub(super) fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// The power fails at the change with this number, from now.
    pub(super) fn set_fuse(&self, changes: u64) {
        self.state.lock().fuse = Some(changes);
    }

    pub(super) fn set_capacity(&self, bytes: u64) {
        self.state.lock().capacity = bytes;
    }

    /// The next syncs of data fail; those of a segment's own header do not.
    pub(super) fn fail_syncs(&self, count: u32) {
        self.state.lock().syncs_to_fail = count;
    }

    pub(super) fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().violations)
    }

    /// The folder that a machine finds after the power failed.
    pub(super) fn crash_folder(&self) -> Self {
        let mut state = self.state.lock();
        let mut random = Random::new(state.random.next_u64());
        let mut files = state.files.clone();
        for change in &state.changes {
            match change {
                NameChange::Created(name) if random.is_one_in(2) => drop(files.remove(name)),
                NameChange::Removed(name, file) if random.is_one_in(2) => {
                    files.entry(name.clone()).or_insert_with(|| Arc::clone(file));
                }
                _ => {}
            }
        }
        let crashed = Self::new(random.next_u64());
        let mut after = crashed.state.lock();
        after.small = state.small.clone();
        after.capacity = state.capacity;
        for (name, file) in files {
            let bytes = crash_file(&file.lock(), &mut random);
            after.files.insert(name, Arc::new(Mutex::new(settled_file(bytes))));
        }
        drop(after);
        crashed
    }

    /// Flips bits of synced data: one in a random file for each.
    pub(super) fn rot_bits(&self, bits: usize) {
        let mut state = self.state.lock();
        for _ in 0..bits {
            let count = state.files.len();
            let index = state.random.below(count);
            let Some(file) = state.files.values().nth(index).cloned() else {
                return;
            };
            let mut file = file.lock();
            if file.durable.is_empty() {
                continue;
            }
            let at = state.random.below(file.durable.len());
            let bit = 1 << state.random.below(8);
            file.durable[at] ^= bit;
            file.current[at] ^= bit;
        }
    }

    /// Changes the bytes of a file as somebody with an editor would.
    pub(super) fn edit_file(&self, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let file = Arc::clone(&self.state.lock().files[name]);
        let mut file = file.lock();
        edit(&mut file.current);
        file.durable = file.current.clone();
    }

    /// Gives each of two files the other's name.
    pub(super) fn swap_names(&self, one: &str, other: &str) {
        let mut state = self.state.lock();
        let (Some(first), Some(second)) = (state.files.remove(one), state.files.remove(other))
        else {
            panic!("{one} and {other} must be there");
        };
        state.files.insert(one.to_owned(), second);
        state.files.insert(other.to_owned(), first);
    }
}

fn settled_file(bytes: Vec<u8>) -> SimFile {
    SimFile {
        current: bytes.clone(),
        durable: bytes,
        dirty: BTreeSet::new(),
        is_sync_failed: false,
    }
}

fn crash_file(file: &SimFile, random: &mut Random) -> Vec<u8> {
    let mut bytes = file.durable.clone();
    let len = if random.is_one_in(2) { file.current.len() } else { file.durable.len() };
    bytes.resize(len, 0);
    let dirty: Vec<usize> = file.dirty.iter().copied().collect();
    for sector in &dirty {
        let mut from = *sector;
        let choice = random.below(16);
        match choice {
            0..6 => continue,
            6..8 => from = dirty[random.below(dirty.len())],
            _ => {}
        }
        let (begin, end) = (sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES);
        let source = from * SECTOR_BYTES;
        if end > bytes.len() || source + SECTOR_BYTES > file.current.len() {
            continue;
        }
        bytes[begin..end].copy_from_slice(&file.current[source..source + SECTOR_BYTES]);
        if choice == 8 {
            bytes[begin + random.below(SECTOR_BYTES)] ^= 1 << random.below(8);
        }
    }
    bytes
}

impl SimState {
    /// Counts a change. Once the power has failed, nothing works.
    fn burn_fuse(&mut self) -> io::Result<()> {
        match &mut self.fuse {
            Some(0) => Err(io::Error::other("no power")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn is_dark(&self) -> bool {
        self.fuse == Some(0)
    }

    fn is_fault(&mut self, one_in: usize) -> bool {
        one_in > 0 && self.random.is_one_in(one_in)
    }
}

struct SimHandle {
    name: String,
    file: Arc<Mutex<SimFile>>,
    state: Arc<Mutex<SimState>>,
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(5)
}

impl StoredFile for SimHandle {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        let faults = state.faults;
        if state.is_dark() || state.is_fault(faults.read) {
            return Err(eio());
        }
        drop(state);
        let file = self.file.lock();
        let begin = offset as usize;
        let source = file.current.get(begin..begin + bytes.len());
        bytes.copy_from_slice(source.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(4096) && bytes.len().is_multiple_of(4096));
        assert_eq!(bytes.as_ptr().align_offset(4096), 0);
        let mut state = self.state.lock();
        if state.is_dark() {
            return Err(eio());
        }
        let faults = state.faults;
        let is_cut = state.burn_fuse().is_err() || state.is_dark();
        let fails = is_cut || state.is_fault(faults.write);
        // What fails may have written a part.
        let written = if fails { state.random.below(bytes.len()) / 512 * 512 } else { bytes.len() };
        drop(state);
        let mut file = self.file.lock();
        let begin = offset as usize;
        assert!(begin + bytes.len() <= file.current.len(), "a write behind the end");
        file.current[begin..begin + written].copy_from_slice(&bytes[..written]);
        file.dirty.extend(begin / SECTOR_BYTES..(begin + written) / SECTOR_BYTES);
        if fails { Err(eio()) } else { Ok(()) }
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        let mut file = self.file.lock();
        if file.is_sync_failed && !state.is_dark() {
            let violation = format!("{} synced after a failed sync", self.name);
            state.violations.push(violation);
        }
        state.burn_fuse()?;
        let faults = state.faults;
        let fails = state.syncs_to_fail > 0 && file.dirty.iter().any(|sector| *sector >= 8);
        state.syncs_to_fail -= u32::from(fails);
        if fails || state.is_dark() || state.is_fault(faults.sync) {
            file.is_sync_failed = true;
            return Err(eio());
        }
        file.durable = file.current.clone();
        file.dirty.clear();
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state.lock().burn_fuse()?;
        self.file.lock().current.resize(len as usize, 0);
        Ok(())
    }

    fn read_len(&self) -> io::Result<u64> {
        Ok(self.file.lock().current.len() as u64)
    }
}

impl StoredFolder for SimFolder {
    fn list_names(&self) -> io::Result<Vec<String>> {
        Ok(self.state.lock().files.keys().cloned().collect())
    }

    fn open_file(&self, name: &str, _: OpenPurpose) -> io::Result<Arc<dyn StoredFile>> {
        let state = self.state.lock();
        let file = state.files.get(name).ok_or(io::ErrorKind::NotFound)?;
        let (file, state) = (Arc::clone(file), Arc::clone(&self.state));
        Ok(Arc::new(SimHandle { name: name.to_owned(), file, state }))
    }

    fn create_file(&self, name: &str, len: u64) -> io::Result<Arc<dyn StoredFile>> {
        {
            let mut state = self.state.lock();
            state.burn_fuse()?;
            let used: usize = state.files.values().map(|file| file.lock().current.len()).sum();
            let faults = state.faults;
            if state.is_fault(faults.create_full) || used as u64 + len > state.capacity {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            assert!(!state.files.contains_key(name), "{name} is there already");
            let file = settled_file(vec![0; len as usize]);
            state.files.insert(name.to_owned(), Arc::new(Mutex::new(file)));
            state.changes.push(NameChange::Created(name.to_owned()));
        }
        self.open_file(name, OpenPurpose::Write)
    }

    fn remove_file(&self, name: &str) -> io::Result<()> {
        let mut state = self.state.lock();
        state.burn_fuse()?;
        let file = state.files.remove(name).ok_or(io::ErrorKind::NotFound)?;
        state.changes.push(NameChange::Removed(name.to_owned(), file));
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        state.burn_fuse()?;
        state.changes.clear();
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let state = self.state.lock();
        let used: usize = state.files.values().map(|file| file.lock().current.len()).sum();
        Ok(state.capacity.saturating_sub(used as u64))
    }

    fn read_small(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.state.lock().small.get(name).cloned())
    }

    fn replace_small(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.state.lock().small.insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }
}
