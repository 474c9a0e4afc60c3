//! The form in which attention is answered, where a caller wants another than the usual one.

use super::payload;
use crate::{RequestError, v1};
use kvd_core::DType;

/// Form of an answer; by default `out` in the dtype of the queries, and natural logarithms of
/// `[tokens, heads]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// Dtype of `out`; `None` is that of the queries.
    pub out_dtype: Option<DType>,
    /// Logarithm of the log-sum-exps.
    pub lse_base: LseBase,
    /// Layout of the log-sum-exps.
    pub lse_order: LseOrder,
}

/// Logarithm of log-sum-exps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LseBase {
    /// `ln`.
    #[default]
    Natural,
    /// `log2`, as merges with `exp2` take it.
    Two,
}

/// Layout of log-sum-exps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LseOrder {
    /// `[sum of n_q, q_heads]`.
    #[default]
    TokensHeads,
    /// `[q_heads, sum of n_q]`.
    HeadsTokens,
}

impl AnswerForm {
    /// The form that a request asks for.
    ///
    /// # Errors
    /// A dtype, base or order that is not known.
    pub fn from_request(request: &v1::AttendRequest) -> Result<Self, RequestError> {
        let unknown =
            |field, raw| RequestError::invalid_field(field, format!("{raw} is not known"));
        let lse_base = match v1::LseBase::try_from(request.lse_base) {
            Ok(v1::LseBase::Natural) => LseBase::Natural,
            Ok(v1::LseBase::Two) => LseBase::Two,
            Err(_) => return Err(unknown("lse_base", request.lse_base)),
        };
        let lse_order = match v1::LseOrder::try_from(request.lse_order) {
            Ok(v1::LseOrder::TokensHeads) => LseOrder::TokensHeads,
            Ok(v1::LseOrder::HeadsTokens) => LseOrder::HeadsTokens,
            Err(_) => return Err(unknown("lse_order", request.lse_order)),
        };
        let out_dtype = payload::optional_dtype(request.out_dtype, "out_dtype")?;
        Ok(Self { out_dtype, lse_base, lse_order })
    }

    /// Asks for this form.
    pub fn write_request(self, request: &mut v1::AttendRequest) {
        request.out_dtype = self.out_dtype.map_or(0, payload::dtype_to_wire);
        request.lse_base = match self.lse_base {
            LseBase::Natural => v1::LseBase::Natural,
            LseBase::Two => v1::LseBase::Two,
        }
        .into();
        request.lse_order = match self.lse_order {
            LseOrder::TokensHeads => v1::LseOrder::TokensHeads,
            LseOrder::HeadsTokens => v1::LseOrder::HeadsTokens,
        }
        .into();
    }

    /// Dtype of `out` where queries are of `dtype`.
    #[must_use]
    pub fn out_dtype_for(self, dtype: DType) -> DType {
        self.out_dtype.unwrap_or(dtype)
    }

    /// Whether it is the usual form where queries are of `dtype`.
    #[must_use]
    pub fn is_usual(self, dtype: DType) -> bool {
        self.out_dtype_for(dtype) == dtype && Self { out_dtype: None, ..self } == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_round_trip_and_unknown_ones_are_refused() {
        for out_dtype in [None, Some(DType::F32), Some(DType::BF16)] {
            for lse_base in [LseBase::Natural, LseBase::Two] {
                for lse_order in [LseOrder::TokensHeads, LseOrder::HeadsTokens] {
                    let form = AnswerForm { out_dtype, lse_base, lse_order };
                    let mut request = v1::AttendRequest::default();
                    form.write_request(&mut request);
                    assert_eq!(AnswerForm::from_request(&request), Ok(form));
                    let usual = out_dtype != Some(DType::BF16)
                        && (lse_base, lse_order) == (LseBase::Natural, LseOrder::TokensHeads);
                    assert_eq!(form.is_usual(DType::F32), usual);
                }
            }
        }
        let bad = v1::AttendRequest { lse_base: 2, ..Default::default() };
        let error = AnswerForm::from_request(&bad).unwrap_err();
        assert_eq!(error.to_string(), "lse_base: 2 is not known");
    }
}
