//! Holding sessions, and choosing sequences of a list.

use super::model::check_name;
use crate::{RequestError, v1};
use kvd_core::{ModelId, SequenceId, SessionId};
use std::time::Duration;

/// The session of a field where 0 stands for none.
#[must_use]
pub fn session_from_wire(id: u64) -> Option<SessionId> {
    (id != 0).then_some(SessionId(id))
}

/// A session to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionHold {
    /// Which one.
    pub target: HoldTarget,
    /// How long it goes on without a stream that holds it; whole milliseconds.
    pub ttl: Duration,
}

/// Which session a stream is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldTarget {
    /// One that is begun now.
    New {
        /// For people: as the name of a model.
        name: String,
        /// Whether an older session of that name is closed first.
        take_over: bool,
    },
    /// One that was begun before and has not ended.
    Again(SessionId),
}

impl TryFrom<v1::HoldSessionRequest> for SessionHold {
    type Error = RequestError;

    fn try_from(request: v1::HoldSessionRequest) -> Result<Self, RequestError> {
        let v1::HoldSessionRequest { name, ttl_ms, take_over, session_id } = request;
        let target = match session_from_wire(session_id) {
            None => {
                check_name(&name)?;
                HoldTarget::New { name, take_over }
            }
            Some(_) if !name.is_empty() => {
                let reason = "given with session_id, whose session has its name";
                return Err(RequestError::invalid_field("name", reason));
            }
            Some(_) if take_over => {
                let reason = "given with session_id; only a new session takes over";
                return Err(RequestError::invalid_field("take_over", reason));
            }
            Some(session) => HoldTarget::Again(session),
        };
        Ok(Self { target, ttl: Duration::from_millis(ttl_ms.into()) })
    }
}

impl From<SessionHold> for v1::HoldSessionRequest {
    fn from(hold: SessionHold) -> Self {
        let ttl_ms = u32::try_from(hold.ttl.as_millis()).unwrap_or(u32::MAX);
        let (name, take_over, session_id) = match hold.target {
            HoldTarget::New { name, take_over } => (name, take_over, 0),
            HoldTarget::Again(session) => (String::new(), false, session.0),
        };
        Self { name, ttl_ms, take_over, session_id }
    }
}

/// Which sequences a page of a list has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceFilter {
    /// Those of this model.
    pub model: Option<ModelId>,
    /// Those of this session.
    pub session: Option<SessionId>,
    /// Those that no call has named for so long.
    pub idle_min: Duration,
    /// Those whose id is above this one.
    pub after: Option<SequenceId>,
    /// Most entries, 1 to [`SequenceFilter::PAGE_MAX`]; 0 stands for that.
    pub limit: u32,
}

impl SequenceFilter {
    /// Most entries of a page.
    pub const PAGE_MAX: u32 = 1000;
}

impl TryFrom<v1::ListSequencesRequest> for SequenceFilter {
    type Error = RequestError;

    fn try_from(request: v1::ListSequencesRequest) -> Result<Self, RequestError> {
        let limit = match request.limit {
            0 => Self::PAGE_MAX,
            limit if limit > Self::PAGE_MAX => {
                let (given, max) = (limit.into(), Self::PAGE_MAX.into());
                return Err(RequestError::OverLimit { field: "limit", given, max });
            }
            limit => limit,
        };
        Ok(Self {
            model: (request.model_id != 0).then_some(ModelId(request.model_id)),
            session: session_from_wire(request.session_id),
            idle_min: Duration::from_millis(request.idle_ms_min),
            after: (request.after_id != 0).then_some(SequenceId(request.after_id)),
            limit,
        })
    }
}

impl From<SequenceFilter> for v1::ListSequencesRequest {
    fn from(filter: SequenceFilter) -> Self {
        Self {
            model_id: filter.model.map_or(0, |model| model.0),
            session_id: filter.session.map_or(0, |session| session.0),
            idle_ms_min: u64::try_from(filter.idle_min.as_millis()).unwrap_or(u64::MAX),
            after_id: filter.after.map_or(0, |sequence| sequence.0),
            limit: filter.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_session() -> SessionHold {
        let target = HoldTarget::New { name: "engine/0".to_owned(), take_over: true };
        SessionHold { target, ttl: Duration::from_millis(1500) }
    }

    #[test]
    fn holds_round_trip() {
        let again = SessionHold { target: HoldTarget::Again(SessionId(7)), ..new_session() };
        for hold in [new_session(), again] {
            let wire = v1::HoldSessionRequest::from(hold.clone());
            assert_eq!(SessionHold::try_from(wire).unwrap(), hold);
        }
        let long = SessionHold { ttl: Duration::MAX, ..new_session() };
        assert_eq!(v1::HoldSessionRequest::from(long).ttl_ms, u32::MAX);
    }

    #[test]
    fn refused_holds_name_the_field() {
        let refusal = |change: fn(&mut v1::HoldSessionRequest)| {
            let mut request = v1::HoldSessionRequest::from(new_session());
            change(&mut request);
            SessionHold::try_from(request).unwrap_err().to_string()
        };
        assert_eq!(refusal(|r| r.name.clear()), "name is missing");
        assert!(refusal(|r| r.name = "a b".into()).starts_with("name: must be 1 to 128"));
        assert!(refusal(|r| r.session_id = 7).starts_with("name: given with session_id"));
        let both = |r: &mut v1::HoldSessionRequest| (r.session_id, r.name) = (7, String::new());
        assert!(refusal(both).starts_with("take_over: given with session_id"));
    }

    #[test]
    fn filters_round_trip_and_pages_are_bounded() {
        let filter = SequenceFilter {
            model: Some(ModelId(1)),
            session: Some(SessionId(2)),
            idle_min: Duration::from_secs(600),
            after: Some(SequenceId(3)),
            limit: 10,
        };
        let wire = v1::ListSequencesRequest::from(filter);
        assert_eq!(SequenceFilter::try_from(wire).unwrap(), filter);
        let all = SequenceFilter::try_from(v1::ListSequencesRequest::default()).unwrap();
        assert_eq!(all, SequenceFilter { limit: 1000, ..SequenceFilter::default() });
        let wire = v1::ListSequencesRequest { limit: 1001, ..Default::default() };
        let refused = SequenceFilter::try_from(wire).unwrap_err();
        assert_eq!(refused.to_string(), "limit is 1001; the maximum is 1000");
    }
}
