//! Compiled kernels on disk, one file each, named by the hash of all that went into them. A file
//! says what it is of and has a checksum: one that is damaged is as good as none. May be deleted at
//! any time.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// The first bytes of a file.
const MAGIC: &[u8] = b"kvd kernels 1\n";
/// A file that is larger is none of ours.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// A file that is being written for longer is nobody's any more.
const WRITE_MAX: Duration = Duration::from_secs(3600);

/// The answer of the cache for one key.
pub(super) enum CacheEntry {
    Image(Vec<u8>),
    Nothing,
    /// A damaged or foreign file, and why.
    Damaged(PathBuf, String),
}

pub(super) struct ImageCache {
    folder: PathBuf,
}

impl ImageCache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The file of what `key` describes.
    pub(super) fn image_path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{:032x}.kernels", xxh3_128(key.as_bytes())))
    }

    /// Removes what writers that crashed have left beside their files. A file that is another's by
    /// then, or cannot be removed, harms nobody.
    pub(super) fn remove_leftovers(&self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()).filter(|path| is_left(path)) {
            let _ = fs::remove_file(path);
        }
    }

    pub(super) fn read_image(&self, key: &str) -> CacheEntry {
        let (path, mut bytes) = (self.image_path(key), Vec::new());
        let read = File::open(&path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => CacheEntry::Nothing,
            Err(error) => CacheEntry::Damaged(path, error.to_string()),
            Ok(_) => match parse_image(&bytes, key) {
                Ok(image) => CacheEntry::Image(image.to_vec()),
                Err(reason) => CacheEntry::Damaged(path, reason.to_owned()),
            },
        }
    }

    /// Writes a file beside its place and moves it there, so that nobody sees half of one.
    pub(super) fn write_image(&self, key: &str, image: &[u8]) -> io::Result<()> {
        create_private_folder(&self.folder)?;
        let path = self.image_path(key);
        let beside = temporary_path(&path);
        // One that is there is another's.
        let mut file = File::create_new(&beside)?;
        let mut write = || {
            let len = |bytes: &[u8]| (bytes.len() as u64).to_le_bytes();
            let checksum = image_checksum(key.as_bytes(), image).to_le_bytes();
            for part in [MAGIC, &len(key.as_bytes()), key.as_bytes(), &checksum, image] {
                file.write_all(part)?;
            }
            file.sync_all()?;
            fs::rename(&beside, &path)
        };
        write().inspect_err(|_| {
            // It may not even be there.
            let _ = fs::remove_file(&beside);
        })
    }
}

/// A name that no other writer has. Its process's number is none: containers that share the folder
/// have the same.
fn temporary_path(path: &Path) -> PathBuf {
    // Seeded by the system, and another each time.
    let random = RandomState::new().hash_one(path);
    path.with_extension(format!("{random:016x}"))
}

/// Whether it has such a name, and is older than any write takes.
fn is_left(path: &Path) -> bool {
    let has_digits = |part: Option<&OsStr>, count: usize| {
        let text = part.and_then(OsStr::to_str).unwrap_or_default();
        text.len() == count && text.bytes().all(|c| c.is_ascii_hexdigit())
    };
    let changed = || fs::metadata(path).and_then(|of| of.modified());
    let is_old = || changed().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > WRITE_MAX));
    has_digits(path.file_stem(), 32) && has_digits(path.extension(), 16) && is_old()
}

/// Whoever may write here chooses what the GPU runs: the folder is its owner's alone.
fn create_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

fn image_checksum(key: &[u8], image: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(key);
    hash.update(image);
    hash.digest128()
}

/// The image of a file for `key`, or the fault of the file.
fn parse_image<'a>(bytes: &'a [u8], key: &str) -> Result<&'a [u8], &'static str> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it does not begin as such a file does")?;
    let (len, rest) = rest.split_first_chunk().ok_or("it is cut off")?;
    let key_bytes = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
    let (of, rest) = rest.split_at_checked(key_bytes).ok_or("it is cut off")?;
    let (sum, image) = rest.split_first_chunk().ok_or("it is cut off")?;
    if u128::from_le_bytes(*sum) != image_checksum(of, image) {
        return Err("its checksum is wrong");
    }
    if of != key.as_bytes() {
        return Err("it is of something else");
    }
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::time::SystemTime;

    fn image(found: CacheEntry) -> Result<Vec<u8>, String> {
        match found {
            CacheEntry::Image(image) => Ok(image),
            CacheEntry::Nothing => Err("nothing".to_owned()),
            CacheEntry::Damaged(_, reason) => Err(reason),
        }
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ImageCache::new(folder.path().join("a/b"));
        assert_eq!(image(cache.read_image("one")).unwrap_err(), "nothing");
        cache.write_image("one", b"cubin").unwrap();
        cache.write_image("one", b"cubin of one").unwrap();
        cache.write_image("two", b"").unwrap();
        assert_eq!(image(cache.read_image("one")).unwrap(), b"cubin of one");
        assert_eq!(image(cache.read_image("two")).unwrap(), b"");
        let files = fs::read_dir(folder.path().join("a/b")).unwrap().count();
        assert_eq!(files, 2, "nothing is left beside them");
        fs::rename(cache.image_path("one"), cache.image_path("two")).unwrap();
        assert_eq!(image(cache.read_image("two")).unwrap_err(), "it is of something else");
    }

    #[test]
    fn names_beside_a_file_are_of_one_writer_each_and_not_by_its_process() {
        let names: BTreeSet<PathBuf> =
            (0..1000).map(|_| temporary_path(Path::new("a.kernels"))).collect();
        assert_eq!(names.len(), 1000);
        let digits = |name: &Path| name.extension().map(|end| end.len());
        assert!(names.iter().all(|name| digits(name) == Some(16)), "{names:?}");
    }

    #[test]
    fn what_a_crash_has_left_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ImageCache::new(folder.path().to_owned());
        cache.remove_leftovers();
        cache.write_image("key", b"image").unwrap();
        let path = cache.image_path("key");
        let (old, new) = (temporary_path(&path), temporary_path(&path));
        let others = folder.path().join("notes.0123456789abcdef");
        for file in [&old, &new, &others] {
            fs::write(file, b"half").unwrap();
        }
        for file in [&path, &old, &others] {
            let at = SystemTime::now() - 2 * WRITE_MAX;
            File::options().write(true).open(file).unwrap().set_modified(at).unwrap();
        }
        cache.remove_leftovers();
        let is_there = [&path, &old, &new, &others].map(|file| file.exists());
        assert_eq!(is_there, [true, false, true, true]);
        ImageCache::new(folder.path().join("none")).remove_leftovers();
    }

    #[test]
    fn of_two_writers_at_once_each_file_is_whole_at_any_time() {
        let folder = tempfile::tempdir().unwrap();
        let of = || ImageCache::new(folder.path().to_owned());
        let images = [vec![1; 9], vec![2; 100_000]];
        of().write_image("key", &images[0]).unwrap();
        std::thread::scope(|scope| {
            let writers = images.each_ref().map(|image| {
                scope.spawn(move || (0..50).for_each(|_| of().write_image("key", image).unwrap()))
            });
            while !writers.iter().all(|writer| writer.is_finished()) {
                let found = image(of().read_image("key")).unwrap();
                assert!(images.contains(&found), "{} bytes", found.len());
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn every_byte_that_changes_or_is_missing_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ImageCache::new(folder.path().to_owned());
        cache.write_image("key", b"image").unwrap();
        let good = fs::read(cache.image_path("key")).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            parse_image(&bad, "key").unwrap_err();
            parse_image(&good[..at], "key").unwrap_err();
        }
        assert_eq!(parse_image(&good, "key").unwrap(), b"image");
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_that_is_made_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let cache = ImageCache::new(folder.path().join("kernels"));
        cache.write_image("key", b"image").unwrap();
        let mode = fs::metadata(folder.path().join("kernels")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
