//! Domain types of the wire: each message, once its values are known to be valid.
//!
//! Each type is made from its message by `TryFrom` (or `From` where nothing can be wrong) and
//! turned back by `From`, so that the daemon and the client share one reading of the wire. What
//! needs the model to be judged is checked by `check_shape`, after the look-up.

mod answer_form;
mod attend;
mod cache;
mod calibrate;
mod call_error;
mod load;
mod model;
mod payload;
mod queries;
mod sequence;
mod session;
mod step;
mod store;
mod stored_bytes;

pub use answer_form::{AnswerForm, LseBase, LseOrder};
pub use attend::{AttendBatch, AttendQuery, Attended, QueryError};
pub use cache::{BlockKeys, ModelIdentity};
pub use calibrate::{CalibrationOrder, MadeCalibration};
pub use call_error::CallError;
pub use load::{LoadPiece, LoadRange};
pub use model::{ModelSpec, RegisteredModel};
pub use payload::inline_payload;
pub use queries::SampledQueries;
pub use sequence::{ForkedSequence, SequenceFork, SequenceTruncation};
pub use session::{HoldTarget, SequenceFilter, SessionHold, session_from_wire};
pub use step::{
    LoadStep, LoadedStep, PartError, RowLayout, RowTable, StepPart, StoreStep, StoredPart,
};
pub use store::{StoreAck, StoreChunk};
