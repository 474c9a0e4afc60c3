//! Answers of attention in the form that a caller asks for: another dtype of outputs, another
//! logarithm or layout of log-sum-exps. Devices know the usual form alone.

use super::{AttendReply, CallContext, Service, ServiceError};
use kvd_core::DType;
use kvd_proto::domain::{AnswerForm, AttendBatch, LseBase, LseOrder};

impl Service {
    /// [`Service::attend_batch`], answered in a form of the caller's.
    ///
    /// # Errors
    /// As [`Service::attend_batch`].
    pub async fn attend_formed(
        &self,
        call: &CallContext,
        batch: AttendBatch,
        form: AnswerForm,
    ) -> Result<AttendReply, ServiceError> {
        let out_dtype = form.out_dtype_for(batch.dtype);
        if form.is_usual(batch.dtype) {
            return self.attend_batch(call, batch).await;
        }
        let (rows, heads) = (batch.query_rows() as usize, batch.q_heads as usize);
        let mut reply = if out_dtype == batch.dtype {
            self.attend_batch(call, batch).await?
        } else {
            self.attend_wide(call, batch, out_dtype).await?
        };
        if form.lse_base == LseBase::Two {
            reply.lse.iter_mut().for_each(|lse| *lse *= std::f32::consts::LOG2_E);
        }
        if form.lse_order == LseOrder::HeadsTokens {
            reply.lse = transpose_lse(&reply.lse, LseShape { rows, heads });
        }
        Ok(reply)
    }

    /// Attends in f32, which every query is exactly, and narrows the outputs.
    async fn attend_wide(
        &self,
        call: &CallContext,
        mut batch: AttendBatch,
        out_dtype: DType,
    ) -> Result<AttendReply, ServiceError> {
        // Errors name the bytes as they came.
        let model = self.batch_model(call, &batch)?;
        batch.check_shape(&model.shape.geometry)?;
        let values = batch.q.len() / batch.dtype.size_bytes();
        let wide_bytes = (values * DType::F32.size_bytes()) as u64;
        let _share =
            self.take_bytes(call, call.bytes_to_admit(batch.q.len() as u64) + wide_bytes)?;
        let call = &CallContext { is_message_admitted: true, ..call.clone() };
        if batch.dtype != DType::F32 {
            let mut wide = vec![0f32; values];
            batch.dtype.widen_values(&batch.q, &mut wide);
            batch.q = wide.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into();
            batch.dtype = DType::F32;
        }
        let mut reply = self.attend_batch(call, batch).await?;
        if out_dtype != DType::F32 {
            let wide: Vec<f32> = reply
                .out
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect();
            reply.out = vec![0; wide.len() * out_dtype.size_bytes()];
            out_dtype.narrow_values(&wide, &mut reply.out);
        }
        Ok(reply)
    }
}

struct LseShape {
    rows: usize,
    heads: usize,
}

/// `[rows, heads]` as `[heads, rows]`.
fn transpose_lse(lse: &[f32], shape: LseShape) -> Vec<f32> {
    let LseShape { rows, heads } = shape;
    let by_head = (0..heads).flat_map(|head| (0..rows).map(move |row| row * heads + head));
    // Where every query was refused there is no row.
    by_head.filter_map(|at| lse.get(at).copied()).collect()
}
