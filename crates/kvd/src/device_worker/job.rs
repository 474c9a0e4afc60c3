//! Jobs of a device, as data: what is to be done, and who is told what came of it.

use crate::scheduler::Kind;
use crate::service::ServiceError;
use crate::service::jobs::{
    Attend, AttendInPlace, CloseRegion, Load, OpenRegion, ReadRegion, Register, Store,
    StoreInPlace, Unregister, WriteRegion,
};
use kvd_compute::{Backend, Stop};
use std::any::Any;
use tokio::sync::oneshot;

/// Work of a job on the device.
pub(crate) trait Work: Send {
    /// Its result.
    type Reply: Send;

    /// In what order it runs.
    fn kind(&self) -> Kind;

    /// Goes on until the reply is there or, `None`, until the slice is over: then it is called
    /// again. Dropped before the reply it undoes what it has begun.
    ///
    /// # Errors
    /// Why it failed; it is not called again.
    fn run(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError>;
}

/// Work, and who waits for its reply.
pub(crate) struct Asked<W: Work> {
    pub(super) work: W,
    pub(super) reply: oneshot::Sender<Result<W::Reply, ServiceError>>,
}

/// State of a job that had the device.
pub(super) enum Step<J> {
    /// It goes on later.
    Paused(J),
    /// It was answered; whether somebody was there to hear it.
    Done { heard: bool },
}

impl<W: Work> Asked<W> {
    fn run(mut self: Box<Self>, backend: &mut dyn Backend, stop: &Stop) -> Step<Box<Self>> {
        let ran = stop.check().map_err(ServiceError::from);
        let ran = ran.and_then(|()| self.work.run(backend, stop));
        let result = match ran {
            // What a failed device did in this job is not known to be done.
            _ if backend.failure().is_some() => Err(super::device_failed()),
            Ok(None) => return Step::Paused(self),
            Ok(Some(reply)) => Ok(reply),
            Err(error) => Err(error),
        };
        let Self { work, reply } = *self;
        // What it holds is free before its caller asks for more.
        drop(work);
        Step::Done { heard: reply.send(result).is_ok() }
    }

    fn refuse(self, error: ServiceError) {
        // Nobody may be there any more.
        let _ = self.reply.send(Err(error));
    }
}

macro_rules! jobs {
    ($($variant:ident: $work:ty;)*) => {
        /// A job of a device.
        pub(crate) enum Job {
            $($variant(Box<Asked<$work>>),)*
        }

        impl Job {
            /// Gives the job the device.
            pub(super) fn run(self, backend: &mut dyn Backend, stop: &Stop) -> Step<Self> {
                match self {
                    $(Self::$variant(asked) => match asked.run(backend, stop) {
                        Step::Paused(asked) => Step::Paused(Self::$variant(asked)),
                        Step::Done { heard } => Step::Done { heard },
                    },)*
                }
            }

            /// Answers the job without having run it to its end.
            pub(super) fn refuse(self, error: ServiceError) {
                match self {
                    $(Self::$variant(asked) => asked.refuse(error),)*
                }
            }
        }

        $(impl From<Asked<$work>> for Job {
            fn from(asked: Asked<$work>) -> Self {
                Self::$variant(Box::new(asked))
            }
        })*
    };
}

jobs! {
    Attend: Attend;
    AttendInPlace: AttendInPlace;
    Store: Store;
    StoreInPlace: StoreInPlace;
    Load: Load;
    OpenRegion: OpenRegion;
    CloseRegion: CloseRegion;
    ReadRegion: ReadRegion;
    WriteRegion: WriteRegion;
    Register: Register;
    Unregister: Unregister;
    Custom: Custom;
}

/// Work of somebody who embeds the daemon.
type Closure =
    Box<dyn FnOnce(&mut dyn Backend) -> Result<Box<dyn Any + Send>, ServiceError> + Send>;

/// Work that is none of the daemon's own.
pub(crate) struct Custom {
    pub(super) kind: Kind,
    /// None once it has begun.
    pub(super) work: Option<Closure>,
}

impl Work for Custom {
    type Reply = Box<dyn Any + Send>;

    fn kind(&self) -> Kind {
        self.kind
    }

    fn run(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError> {
        self.work.take().map(|work| work(backend)).transpose()
    }
}
