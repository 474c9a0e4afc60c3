//! Names of objects, and the keyed hash at their end. Pure.

use kvd_tier::{ObjectName, ScopeId};
use std::fmt;

/// Version of names and of what is under them: another is another name, never a migration.
const NAME_VERSION: &str = "k1";
/// Bytes of the keyed hash.
pub(crate) const MAC_BYTES: usize = 32;
/// Bytes of a secret at least.
const SECRET_BYTES_MIN: usize = 16;

fn hash_key(scope: ScopeId, position: u32, key: &[u8]) -> u128 {
    let mut hash = blake3::Hasher::new_derive_key("kvd remote block 1");
    hash.update(&scope.0);
    hash.update(&position.to_le_bytes());
    hash.update(key);
    let digest = hash.finalize();
    // 0 stands for no name.
    u128::from_le_bytes(digest.as_bytes().first_chunk().copied().unwrap_or_default()).max(1)
}

/// The name of the block at a position of a prefix: of its key, and of the key of the block before
/// it, where that is known.
#[must_use]
pub fn name_object(
    scope: ScopeId,
    position: u32,
    key: &[u8],
    parent_key: Option<&[u8]>,
) -> ObjectName {
    let parent = position.checked_sub(1).zip(parent_key);
    let parent = parent.map_or(0, |(position, key)| hash_key(scope, position, key));
    ObjectName { scope, digest: hash_key(scope, position, key), parent, position }
}

/// Whether a record's own key is the one that its name was made of.
pub(crate) fn has_name_of(name: &ObjectName, key: &[u8]) -> bool {
    name.digest == hash_key(name.scope, name.position, key)
}

/// A secret that daemons share: objects end with a hash under it.
#[derive(Clone)]
pub struct MacKey {
    key: [u8; 32],
    /// In names of objects: whoever has another secret, or none, never meets them.
    id: String,
}

/// A file's content that is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a secret of {bytes} bytes: at least {SECRET_BYTES_MIN} are needed")]
pub struct MacKeyError {
    bytes: usize,
}

impl MacKey {
    /// From a file's content; blanks at its end do not count.
    ///
    /// # Errors
    /// Too few bytes.
    pub fn from_secret(secret: &[u8]) -> Result<Self, MacKeyError> {
        let secret = secret.trim_ascii_end();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(MacKeyError { bytes: secret.len() });
        }
        let key = blake3::derive_key("kvd remote mac 1", secret);
        let id = blake3::derive_key("kvd remote mac id 1", secret);
        let id = id[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { key, id })
    }

    pub(crate) fn hash_record(&self, record: &[u8]) -> [u8; MAC_BYTES] {
        *blake3::keyed_hash(&self.key, record).as_bytes()
    }

    /// The record of an object that ends with the right hash.
    pub(crate) fn verify_object<'a>(&self, object: &'a [u8]) -> Option<&'a [u8]> {
        let (record, mac) = object.split_last_chunk::<MAC_BYTES>()?;
        // Compared in constant time.
        let is_right = blake3::keyed_hash(&self.key, record) == blake3::Hash::from_bytes(*mac);
        is_right.then_some(record)
    }
}

impl fmt::Debug for MacKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "MacKey({})", self.id)
    }
}

/// Makes the paths of objects.
#[derive(Clone, Debug)]
pub(crate) struct ObjectPaths {
    root: String,
}

impl ObjectPaths {
    pub(crate) fn new(prefix: &str, mac: Option<&MacKey>) -> Self {
        let prefix = prefix.trim_matches('/');
        let slash = if prefix.is_empty() { "" } else { "/" };
        let of_mac = mac.map_or_else(String::new, |mac| format!("-{}", mac.id));
        Self { root: format!("{prefix}{slash}{NAME_VERSION}{of_mac}") }
    }

    pub(crate) fn object_path(&self, name: &ObjectName) -> String {
        let digest = format!("{:032x}", name.digest);
        format!("{}/{}/{}/{digest}", self.root, name.scope, &digest[..2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_scope_position_and_key_alone() {
        let scope = ScopeId([1; 16]);
        let name = name_object(scope, 1, b"b", Some(b"a"));
        assert_eq!(name.parent, name_object(scope, 0, b"a", None).digest);
        assert_eq!(name_object(scope, 1, b"b", None), ObjectName { parent: 0, ..name });
        for other in [
            name_object(ScopeId([2; 16]), 1, b"b", None),
            name_object(scope, 2, b"b", None),
            name_object(scope, 1, b"b\0", None),
        ] {
            assert_ne!(other.digest, name.digest);
        }
        assert!(has_name_of(&name, b"b") && !has_name_of(&name, b"a"));
        let path = ObjectPaths::new("/kvd/", None).object_path(&name);
        let digest = format!("{:032x}", name.digest);
        let scope = "01".repeat(16);
        assert_eq!(path, format!("kvd/k1/{scope}/{}/{digest}", &digest[..2]));
        assert!(ObjectPaths::new("", None).object_path(&name).starts_with("k1/"));
    }

    #[test]
    fn a_secret_has_names_of_its_own_and_an_end_that_nobody_else_can_write() {
        let key = MacKey::from_secret(b"sixteen bytes, yes\n").unwrap();
        let other = MacKey::from_secret(b"sixteen bytes, no").unwrap();
        assert!(MacKey::from_secret(b"short      \n\n\n\n\n\n").is_err());
        let paths = |key| ObjectPaths::new("p", key).root;
        let roots = [paths(None), paths(Some(&key)), paths(Some(&other))];
        assert!(roots[1].starts_with("p/k1-") && roots[0] != roots[1] && roots[1] != roots[2]);
        let mut object = b"record".to_vec();
        object.extend(key.hash_record(b"record"));
        assert_eq!(key.verify_object(&object), Some(&b"record"[..]));
        assert_eq!(other.verify_object(&object), None);
        for at in 0..object.len() {
            let mut damaged = object.clone();
            damaged[at] ^= 1;
            assert_eq!(key.verify_object(&damaged), None);
            assert_eq!(key.verify_object(&object[..at]), None);
        }
    }
}
