//! Where a block is that is not in the pool, or not only there. Plain values.

/// Where a record lies, in words of whoever wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskPlace(pub [u64; 4]);

/// Name of a block's object in a store that daemons share, in words of whoever named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePlace(pub [u64; 4]);

/// Where a block's record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordPlace {
    /// On this daemon's disk.
    Disk(DiskPlace),
    /// In a store that daemons share, as far as is known: it may be gone.
    Remote(RemotePlace),
}

/// Whether a block is below the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DiskState {
    /// It is not.
    #[default]
    Absent,
    /// It is to be written; it may be remote already.
    Queued(Option<RemotePlace>),
    /// Its record is durable.
    At(DiskPlace),
    /// It is in a store that daemons share, and not on disk.
    Remote(RemotePlace),
}

impl DiskState {
    /// Where its record lies on disk.
    pub(crate) fn disk_place(self) -> Option<DiskPlace> {
        match self {
            Self::At(place) => Some(place),
            Self::Absent | Self::Queued(_) | Self::Remote(_) => None,
        }
    }

    /// Whether it has room on disk, or is to have it.
    pub(crate) fn takes_disk(self) -> bool {
        matches!(self, Self::At(_) | Self::Queued(_))
    }

    /// Its object, of a block that is not on disk.
    pub(crate) fn remote_place(self) -> Option<RemotePlace> {
        match self {
            Self::Queued(remote) => remote,
            Self::Remote(place) => Some(place),
            Self::Absent | Self::At(_) => None,
        }
    }

    /// Where it can be read that is not in the pool.
    pub(crate) fn record_place(self) -> Option<RecordPlace> {
        let remote = self.remote_place().map(RecordPlace::Remote);
        self.disk_place().map(RecordPlace::Disk).or(remote)
    }
}
