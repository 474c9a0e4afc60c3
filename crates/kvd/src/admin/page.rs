//! The web page of the admin port: one file without anything from elsewhere, and the figures that
//! it asks for. The page itself says nothing of the daemon; figures pass the doors of rpcs.

use super::{check_reader, refusal_response};
use crate::access::ConnectionPeer;
use crate::service::Service;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::{Extension, Json};
use std::sync::Arc;

const PAGE: &str = include_str!("page.html");
/// Where [`PAGE`] has the word that lets its own styles and script run, and nothing else.
const NONCE_PLACE: &str = "{nonce}";
const NONCE_BYTES: usize = 16;

/// Answers with the page.
pub(super) async fn answer_page() -> Response {
    let mut bytes = [0; NONCE_BYTES];
    if let Err(error) = getrandom::fill(&mut bytes) {
        tracing::error!(%error, "the web page has no nonce: the system gives no random bytes");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let nonce: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    (headers, Html(PAGE.replace(NONCE_PLACE, &nonce))).into_response()
}

/// Answers with the figures, of the namespaces that the caller may use.
pub(super) async fn answer_overview(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Arc<ConnectionPeer>>,
    headers: HeaderMap,
) -> Response {
    let reader = match check_reader(&service, &peer, &headers, "Overview") {
        Ok(reader) => reader,
        Err(error) => return refusal_response(&error),
    };
    let look = move || service.describe_overview(reader.as_deref());
    match tokio::task::spawn_blocking(look).await {
        Ok(overview) => ([(header::CACHE_CONTROL, "no-store")], Json(overview)).into_response(),
        Err(error) => {
            tracing::error!(%error, "the figures of the web page could not be made");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
