//! Jobs of a device, as data: what is to be done, and who is told what came of it.

use crate::scheduler::JobKind;
use crate::service::ServiceError;
use crate::service::jobs::{
    AttendInPlace, AttendJob, CloseRegion, ExportJob, FillJob, ImportJob, LoadJob, LoadStepJob,
    OpenRegion, PublishJob, ReadRegion, RegisterJob, StoreInPlace, StoreJob, StoreStepJob,
    UnregisterJob, WriteRegion,
};
use kvd_compute::{AttendPlan, Backend, Stop};
use std::any::Any;
use std::time::Duration;
use tokio::sync::oneshot;

/// Work of a job on the device.
pub(crate) trait DeviceWork: Send {
    /// Result of the work.
    type Reply: Send;

    /// Kind by which it is scheduled.
    fn job_kind(&self) -> JobKind;

    /// The question of an attend that any thread may give to the device; none of other work.
    fn caller_plan(&self) -> Option<&AttendPlan> {
        None
    }

    /// Whether it goes on before any other work than attends; asked where its slice is over.
    fn goes_on_first(&self) -> bool {
        self.job_kind() == JobKind::Store
    }

    /// Goes on until the reply is there or, `None`, until the slice is over: then it is called
    /// again. Dropped before the reply it undoes what it has begun.
    ///
    /// # Errors
    /// Why it failed; it is not called again.
    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError>;
}

/// Who waits for a reply.
pub(crate) enum JobCaller<R> {
    /// A task, which sleeps until it is there.
    Task(oneshot::Sender<Result<R, ServiceError>>),
    /// Work of the thread that has the device, which is short and takes no lock for long; whether
    /// somebody was there to hear it. Dropped where there is no reply.
    Told(Box<dyn FnOnce(Result<R, ServiceError>) -> bool + Send>),
}

impl<R> JobCaller<R> {
    /// Tells the reply; whether somebody was there to hear it.
    pub(super) fn tell_reply(self, reply: Result<R, ServiceError>) -> bool {
        match self {
            Self::Task(task) => task.send(reply).is_ok(),
            Self::Told(tell) => tell(reply),
        }
    }
}

/// Work, and who waits for its reply.
pub(crate) struct AskedWork<W: DeviceWork> {
    pub(super) work: W,
    pub(super) caller: JobCaller<W::Reply>,
}

/// State of a job that had the device.
pub(super) enum JobStep<J> {
    /// It goes on later.
    Paused(J),
    /// It was answered; whether somebody was there to hear it.
    Done { heard: bool },
}

impl<W: DeviceWork> AskedWork<W> {
    fn run_work(mut self: Box<Self>, backend: &mut dyn Backend, stop: &Stop) -> JobStep<Box<Self>> {
        let ran = stop.check().map_err(ServiceError::from);
        let ran = ran.and_then(|()| self.work.run_slice(backend, stop));
        let result = match ran {
            // What a failed device did in this job is not known to be done.
            _ if backend.failure().is_some() => Err(super::device_failed()),
            Ok(None) => return JobStep::Paused(self),
            Ok(Some(reply)) => Ok(reply),
            Err(error) => Err(error),
        };
        let Self { work, caller } = *self;
        // What it holds is free before its caller asks for more.
        drop(work);
        JobStep::Done { heard: caller.tell_reply(result) }
    }

    fn refuse_work(self, error: ServiceError) {
        let Self { work, caller } = self;
        // As above: a store that has begun holds slots.
        drop(work);
        // Nobody may be there any more.
        caller.tell_reply(Err(error));
    }
}

macro_rules! jobs {
    ($($variant:ident: $work:ty;)*) => {
        /// A job of a device.
        pub(crate) enum DeviceJob {
            $($variant(Box<AskedWork<$work>>),)*
        }

        impl DeviceJob {
            /// Gives the job the device.
            pub(super) fn run_job(self, backend: &mut dyn Backend, stop: &Stop) -> JobStep<Self> {
                match self {
                    $(Self::$variant(asked) => match asked.run_work(backend, stop) {
                        JobStep::Paused(asked) => JobStep::Paused(Self::$variant(asked)),
                        JobStep::Done { heard } => JobStep::Done { heard },
                    },)*
                }
            }

            /// Whether it goes on before any other work than attends.
            pub(super) fn goes_on_first(&self) -> bool {
                match self {
                    $(Self::$variant(asked) => asked.work.goes_on_first(),)*
                }
            }

            /// Answers the job without having run it to its end.
            pub(super) fn refuse_job(self, error: ServiceError) {
                match self {
                    $(Self::$variant(asked) => asked.refuse_work(error),)*
                }
            }
        }

        $(impl From<AskedWork<$work>> for DeviceJob {
            fn from(asked: AskedWork<$work>) -> Self {
                Self::$variant(Box::new(asked))
            }
        })*
    };
}

jobs! {
    Attend: AttendJob;
    AttendInPlace: AttendInPlace;
    Store: StoreJob;
    StoreInPlace: StoreInPlace;
    StoreStep: StoreStepJob;
    Load: LoadJob;
    LoadStep: LoadStepJob;
    Publish: PublishJob;
    Export: ExportJob;
    Import: ImportJob;
    Fill: FillJob;
    OpenRegion: OpenRegion;
    CloseRegion: CloseRegion;
    ReadRegion: ReadRegion;
    WriteRegion: WriteRegion;
    Register: RegisterJob;
    Unregister: UnregisterJob;
    Custom: CustomJob;
}

/// Work of somebody who embeds the daemon.
type WorkClosure =
    Box<dyn FnOnce(&mut dyn Backend) -> Result<Box<dyn Any + Send>, ServiceError> + Send>;

/// Work that is none of the daemon's own.
pub(crate) struct CustomJob {
    pub(super) kind: JobKind,
    /// None once it has begun.
    pub(super) work: Option<WorkClosure>,
}

impl DeviceWork for CustomJob {
    type Reply = Box<dyn Any + Send>;

    fn job_kind(&self) -> JobKind {
        self.kind
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<Self::Reply>, ServiceError> {
        self.work.take().map(|work| work(backend)).transpose()
    }
}

/// Says in the span of a call how long it waited for the device. Signed, as numbers of
/// OpenTelemetry are.
pub(super) fn record_wait(span: &tracing::Span, waited: Duration) {
    span.record("queue_us", i64::try_from(waited.as_micros()).unwrap_or(i64::MAX));
}

/// Says in the span of a call how long it had the device.
pub(super) fn record_cost(span: &tracing::Span, cost: Duration) {
    span.record("device_us", i64::try_from(cost.as_micros()).unwrap_or(i64::MAX));
}
