//! Streams that were let in, and what ends them: a table in which they would not be.

use super::principals::bearer_token;
use super::token::TokenHash;
use super::{AccessControl, AccessRequest, find_rights};
use crate::service::{CallOwner, ServiceError};
use kvd_core::Namespace;

/// A stream that was let in; of its token the hash is kept.
pub(crate) struct GrantedCall {
    owner: CallOwner,
    token: Option<TokenHash>,
    rpc: String,
    namespace: Namespace,
}

impl GrantedCall {
    /// A request that was let in, of a connection.
    pub(crate) fn of_request(request: &AccessRequest<'_>, owner: CallOwner) -> Self {
        let token = request.authorization.and_then(bearer_token);
        Self {
            owner,
            token: token.map(TokenHash::of_token),
            rpc: request.rpc.to_owned(),
            namespace: request.namespace.clone(),
        }
    }
}

impl AccessControl {
    /// Returns once a stream that was let in would be let in no more, with the reason. It is
    /// counted and logged as any refusal.
    pub(crate) async fn wait_for_refusal(&self, granted: &GrantedCall) -> ServiceError {
        // Before the first look: no table is missed.
        let mut replaced = self.replaced.subscribe();
        loop {
            if let Err(error) = self.check_again(granted) {
                return error;
            }
            if replaced.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn check_again(&self, granted: &GrantedCall) -> Result<(), ServiceError> {
        let GrantedCall { owner, token, rpc, namespace } = granted;
        let peer = owner.call_peer();
        let request = AccessRequest { peer, authorization: None, rpc, namespace };
        let table = self.table.read().clone();
        let found = match token {
            Some(hash) => table.find_by_hash(hash),
            None => table.find_by_peer(peer),
        };
        let checked = Self::check_principal(&request, find_rights(rpc), found);
        checked.map(drop).map_err(|denied| self.note_refusal(&request, denied))
    }
}
