//! A record as an object of a store that daemons share: framed for no folder, named by what all
//! daemons know, verified against the name that was asked for. Pure.
//!
//! It is a record as in an exported file. Its name has no hash of a folder's secret seed in it:
//! the digest is the object's, the parent's lineage is the digest of the block before it.

use crate::aligned::AlignedBytes;
use crate::draft::RecordDraft;
use crate::name::{BlockName, RecordKind, RecordMeta, ScopeId};
use crate::part::{RecordHead, RecordPart};
use crate::record::{FramePlace, KEY_BYTES_MAX, RecordFlaw, verify_record};
use std::sync::Arc;

/// The name of a block among daemons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ObjectName {
    /// Scope of the key.
    pub scope: ScopeId,
    /// Hash of scope, position and key.
    pub digest: u128,
    /// The digest of the block before it; 0 for a first block, and where the writer had no key of
    /// that one.
    pub parent: u128,
    /// Blocks before it.
    pub position: u32,
}

impl RecordDraft {
    /// The record's bytes as an object under a name.
    #[must_use]
    pub fn to_object(&self, name: &ObjectName, key: &[u8]) -> AlignedBytes {
        let mut sealed = self.copy_draft().seal_record();
        let ObjectName { scope, digest, parent, position } = *name;
        let header = &mut sealed.header;
        header.name = BlockName { scope, digest, lineage: 0, parent_lineage: parent, position };
        let key = &key[..key.len().min(KEY_BYTES_MAX)];
        header.key = [0; KEY_BYTES_MAX];
        header.key[..key.len()].copy_from_slice(key);
        header.key_bytes = key.len() as u8;
        (header.serial, header.synced_to) = (0, 0);
        sealed.frame_at(&FramePlace::default());
        sealed.into_bytes()
    }
}

impl RecordPart {
    /// Takes an object's bytes as the record of a name: all layers, each verified.
    ///
    /// # Errors
    /// [`RecordFlaw`], of damage, and `Misplaced` of another block's record.
    pub fn from_object(bytes: &[u8], name: &ObjectName) -> Result<Self, RecordFlaw> {
        let mut aligned = AlignedBytes::with_zeros(bytes.len());
        aligned.copy_from_slice(bytes);
        let verified = verify_record(&aligned, &FramePlace::default())?;
        let header = &verified.header;
        let found = &header.name;
        let is_asked_for = header.kind == RecordKind::Block
            && header.record_bytes == bytes.len() as u64
            && found.scope == name.scope
            && found.digest == name.digest
            && found.position == name.position;
        // A writer that knew the block before it says so; a reader that knows it too compares.
        let is_behind =
            [found.parent_lineage, name.parent].contains(&0) || found.parent_lineage == name.parent;
        if !is_asked_for || !is_behind {
            return Err(RecordFlaw::Misplaced);
        }
        let layers = 0..header.layers;
        let head = Arc::new(RecordHead::from_verified(verified, &aligned));
        Ok(Self { head, layers, bytes: aligned, begin: 0 })
    }

    /// Whether the record says that it is of this key.
    #[must_use]
    pub fn has_key(&self, key: &[u8]) -> bool {
        let RecordMeta { key: found, .. } = self.record_meta();
        *found == *key
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{LayerShape, RecordShape};

    const NAME: ObjectName =
        ObjectName { scope: ScopeId([3; 16]), digest: 17, parent: 16, position: 1 };

    fn draft() -> RecordDraft {
        let layers = vec![LayerShape { form: vec![1, 2], bytes: 5000 }; 3];
        let meta = RecordMeta { name: BlockName::default(), key: Box::default() };
        let mut draft =
            RecordDraft::new(&RecordShape { meta, tables: vec![9; 30], layers }).unwrap();
        for layer in 0..3 {
            draft.layer_mut(layer).unwrap().fill(40 + layer as u8);
        }
        draft
    }

    #[test]
    fn an_object_is_read_under_its_name_alone() {
        let bytes = draft().to_object(&NAME, b"key");
        let part = RecordPart::from_object(&bytes, &NAME).unwrap();
        assert!(part.has_key(b"key") && !part.has_key(b"ke") && !part.has_key(b"key\0"));
        assert_eq!((part.layer_range(), part.table_bytes()), (0..3, &[9; 30][..]));
        assert_eq!(part.layer_bytes(2).unwrap(), [42; 5000]);
        let others = [
            ObjectName { scope: ScopeId([4; 16]), ..NAME },
            ObjectName { digest: 18, ..NAME },
            ObjectName { parent: 15, ..NAME },
            ObjectName { position: 2, ..NAME },
        ];
        for other in others {
            let refused = RecordPart::from_object(&bytes, &other).unwrap_err();
            assert_eq!(refused, RecordFlaw::Misplaced);
        }
        // Whoever has no key of the block before it cannot compare.
        let unknown = ObjectName { parent: 0, ..NAME };
        assert!(RecordPart::from_object(&bytes, &unknown).is_ok());
        assert!(RecordPart::from_object(&draft().to_object(&unknown, b"key"), &NAME).is_ok());
    }

    #[test]
    fn damage_anywhere_that_is_read_is_found() {
        let bytes = draft().to_object(&NAME, b"key");
        let read = |bytes: &[u8]| RecordPart::from_object(bytes, &NAME);
        for end in [0, 100, 4096, bytes.len() - 4096, bytes.len() - 1] {
            assert!(read(&bytes[..end]).is_err(), "cut off at {end}");
        }
        let mut longer = bytes.to_vec();
        longer.extend([0; 4096]);
        assert!(read(&longer).is_err());
        for at in (0..256).chain((256..15_000).step_by(97)) {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0x10;
            // Zeros between layers are of no meaning.
            let same = |part: RecordPart| {
                (0..3).all(|layer| part.layer_bytes(layer).unwrap() == [40 + layer as u8; 5000])
            };
            let read = read(&damaged);
            assert!(read.is_err() || at >= 256 && read.is_ok_and(same), "a flipped bit at {at}");
        }
    }
}
