//! Principals: who they are, what they may do, and how a peer is found among them.

use super::limits::{PrincipalCall, PrincipalLimits, PrincipalLoad};
use super::peer::ConnectionPeer;
use super::token::TokenHash;
use crate::bounded_file::read_text;
use crate::config::AllowedNamespaces;
use crate::service::{ByteBudget, ServiceError};
use kvd_core::{ErrorCode, Namespace};
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use subtle::{Choice, ConditionallySelectable};

/// Most principals of a file.
const PRINCIPALS_MAX: usize = 4096;

/// A right of a principal in its namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AccessRole {
    /// Store, attend, load: the work of an engine.
    Use,
    /// Look, and end what others left.
    Operate,
    /// Read the page of metrics, which names all namespaces.
    ReadMetrics,
}

impl AccessRole {
    fn role_name(self) -> &'static str {
        match self {
            Self::Use => "use",
            Self::Operate => "operate",
            Self::ReadMetrics => "read_metrics",
        }
    }
}

/// Somebody who may use the daemon.
#[derive(Debug)]
pub(crate) struct AccessPrincipal {
    /// For logs and errors.
    pub(crate) name: String,
    /// Namespaces that it may use.
    pub(crate) namespaces: AllowedNamespaces,
    roles: Vec<AccessRole>,
    load: PrincipalLoad,
}

impl AccessPrincipal {
    /// Bytes that its calls may have at once, where that is limited.
    pub(crate) fn byte_budget(&self) -> Option<&ByteBudget> {
        self.load.byte_budget()
    }

    pub(super) fn begin_call(&self) -> Result<PrincipalCall, ServiceError> {
        self.load.begin_call(&self.name)
    }

    pub(super) fn check_role(&self, rpc: &str, roles: &[AccessRole]) -> Result<(), ServiceError> {
        if roles.iter().any(|role| self.roles.contains(role)) {
            return Ok(());
        }
        let message = format!(
            "principal {} has the roles {}, and {rpc} needs {}: ask for that role in the file of \
             access.principals",
            self.name,
            join_roles(&self.roles),
            join_roles(roles),
        );
        Err(ServiceError::new(ErrorCode::PermissionDenied, message))
    }

    pub(super) fn check_namespace(&self, namespace: &Namespace) -> Result<(), ServiceError> {
        if self.namespaces.allow_namespace(namespace) {
            return Ok(());
        }
        let message = format!(
            "principal {} may not use namespace {namespace}: name one of its own in kvd-namespace, \
             or ask for this one in the file of access.principals",
            self.name
        );
        Err(ServiceError::new(ErrorCode::NamespaceDenied, message))
    }
}

fn join_roles(roles: &[AccessRole]) -> String {
    roles.iter().map(|role| role.role_name()).collect::<Vec<_>>().join(" or ")
}

/// Why a file of principals cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PrincipalsError(String);

/// A file of principals as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrincipalsFile {
    /// None at all is told in words of its own.
    #[serde(default)]
    principals: Vec<RawPrincipal>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPrincipal {
    name: String,
    namespaces: Vec<String>,
    roles: Vec<AccessRole>,
    #[serde(default)]
    tokens: Vec<String>,
    #[serde(default)]
    certificates: Vec<String>,
    #[serde(default)]
    uids: Vec<u32>,
    #[serde(default)]
    limits: PrincipalLimits,
}

/// The hash of a token, and whose it is.
struct TokenRow {
    hash: TokenHash,
    principal: u32,
}

/// Principals by what they show.
#[derive(Default)]
pub(crate) struct PrincipalTable {
    all: Vec<Arc<AccessPrincipal>>,
    tokens: Vec<TokenRow>,
    certificates: HashMap<String, Arc<AccessPrincipal>>,
    uids: HashMap<u32, Arc<AccessPrincipal>>,
}

impl PrincipalTable {
    /// Reads a file.
    ///
    /// # Errors
    /// Says where it is wrong.
    pub(crate) fn read_file(path: &Path) -> Result<Self, PrincipalsError> {
        let named = |reason: String| PrincipalsError(format!("{}: {reason}", path.display()));
        let text = read_text(path).map_err(|error| named(error.to_string()))?;
        Self::parse_text(&text).map_err(|error| named(error.to_string()))
    }

    /// Reads a text.
    pub(super) fn parse_text(text: &str) -> Result<Self, PrincipalsError> {
        let file: PrincipalsFile =
            toml::from_str(text).map_err(|error| PrincipalsError(error.to_string()))?;
        if file.principals.is_empty() {
            let reason = "has no [[principals]]: nobody could use the daemon";
            return Err(PrincipalsError(reason.to_owned()));
        }
        if file.principals.len() > PRINCIPALS_MAX {
            return Err(PrincipalsError(format!("more than {PRINCIPALS_MAX} principals")));
        }
        let (mut table, mut names) = (Self::default(), BTreeSet::new());
        for raw in file.principals {
            let name = raw.name.clone();
            if name.is_empty() || !names.insert(name.clone()) {
                return Err(PrincipalsError(format!("name {name:?} is empty or stands twice")));
            }
            table
                .add_principal(raw)
                .map_err(|reason| PrincipalsError(format!("principal {name:?}: {reason}")))?;
        }
        Ok(table)
    }

    fn add_principal(&mut self, raw: RawPrincipal) -> Result<(), String> {
        let namespaces = AllowedNamespaces::parse_names(&raw.namespaces)
            .map_err(|reason| format!("namespaces: {reason}"))?;
        if raw.roles.is_empty() {
            return Err("roles is empty; write roles = [\"use\"], for example".to_owned());
        }
        if raw.tokens.is_empty() && raw.certificates.is_empty() && raw.uids.is_empty() {
            return Err("shows nothing: give it tokens, certificates or uids".to_owned());
        }
        raw.limits.check_values()?;
        let (index, load) = (self.all.len() as u32, PrincipalLoad::new(raw.limits));
        let RawPrincipal { name, roles, .. } = raw;
        let principal = Arc::new(AccessPrincipal { name, namespaces, roles, load });
        for text in &raw.tokens {
            let hash = TokenHash::from_text(text).ok_or(
                "tokens: not sha256: and 64 hexadecimal digits; kvd token makes a token and its \
                 hash",
            )?;
            if self.tokens.iter().any(|row| bool::from(row.hash.is_same(&hash))) {
                return Err("tokens: one stands twice in the file".to_owned());
            }
            self.tokens.push(TokenRow { hash, principal: index });
        }
        for name in raw.certificates {
            if !(name.starts_with("dns:") || name.starts_with("uri:")) {
                return Err(format!(
                    "certificates: {name:?} is neither dns:NAME nor uri:URI, the alternative names \
                     of a certificate"
                ));
            }
            if self.certificates.insert(name.clone(), principal.clone()).is_some() {
                return Err(format!("certificates: {name:?} stands twice in the file"));
            }
        }
        for uid in raw.uids {
            if self.uids.insert(uid, principal.clone()).is_some() {
                return Err(format!("uids: {uid} stands twice in the file"));
            }
        }
        self.all.push(principal);
        Ok(())
    }

    /// This table, with what the principals of an earlier one have under way.
    pub(super) fn carry_over(mut self, earlier: &Self) -> Self {
        let by_name = |of: &Arc<AccessPrincipal>| (of.name.clone(), of.clone());
        let earlier: HashMap<_, _> = earlier.all.iter().map(by_name).collect();
        let carry = |of: &mut Arc<AccessPrincipal>| {
            let Some(before) = earlier.get(&of.name) else { return };
            let (namespaces, roles) = (of.namespaces.clone(), of.roles.clone());
            let load = of.load.carry_over(&before.load);
            *of = Arc::new(AccessPrincipal { name: of.name.clone(), namespaces, roles, load });
        };
        self.all.iter_mut().for_each(carry);
        let named: HashMap<_, _> = self.all.iter().map(by_name).collect();
        let shown = self.certificates.values_mut().chain(self.uids.values_mut());
        shown.for_each(|of| *of = named[&of.name].clone());
        self
    }

    /// How many there are.
    pub(crate) fn count_principals(&self) -> usize {
        self.all.len()
    }

    /// Who a peer is: by the token that the call carries, else by its certificate, else by its
    /// user. One that is shown and wrong is refused, whatever else would do.
    pub(super) fn find_principal(
        &self,
        peer: &ConnectionPeer,
        authorization: Option<&[u8]>,
    ) -> Result<Arc<AccessPrincipal>, ServiceError> {
        let unknown = |reason: String| ServiceError::new(ErrorCode::Unauthenticated, reason);
        if let Some(value) = authorization {
            let token = bearer_token(value).ok_or_else(|| {
                unknown("authorization is not \"Bearer TOKEN\", the one form that kvd knows".into())
            })?;
            return self.find_by_hash(&TokenHash::of_token(token));
        }
        self.find_by_peer(peer)
    }

    /// Whose a token is, by its hash.
    pub(super) fn find_by_hash(
        &self,
        shown: &TokenHash,
    ) -> Result<Arc<AccessPrincipal>, ServiceError> {
        self.find_by_token(shown).ok_or_else(|| {
            let reason = "the bearer token is of no principal: it was rotated, or removed";
            ServiceError::new(ErrorCode::Unauthenticated, reason)
        })
    }

    /// Who a peer is that shows no token.
    pub(super) fn find_by_peer(
        &self,
        peer: &ConnectionPeer,
    ) -> Result<Arc<AccessPrincipal>, ServiceError> {
        let unknown = |reason: String| ServiceError::new(ErrorCode::Unauthenticated, reason);
        if let Some(certificate) = peer.certificate_names() {
            let found = certificate.names.iter().find_map(|name| self.certificates.get(name));
            return found.cloned().ok_or_else(|| {
                unknown(format!(
                    "the client certificate is of no principal; it has {}, of which one must stand \
                     in the file of access.principals",
                    certificate.names.join(", ")
                ))
            });
        }
        match peer.peer_uid() {
            Some(uid) => self.uids.get(&uid).cloned().ok_or_else(|| {
                unknown(format!(
                    "uid {uid} is of no principal: list it in the file of access.principals, or \
                     send a token"
                ))
            }),
            None => Err(unknown(
                "the call shows no principal: send \"authorization: Bearer TOKEN\", show a client \
                 certificate, or use a Unix socket as a user whom the file of access.principals \
                 lists"
                    .into(),
            )),
        }
    }

    /// Compares with all, so that the time tells nothing of which one it is.
    fn find_by_token(&self, shown: &TokenHash) -> Option<Arc<AccessPrincipal>> {
        let (mut found, mut index) = (Choice::from(0), 0);
        for row in &self.tokens {
            let same = row.hash.is_same(shown);
            index.conditional_assign(&row.principal, same);
            found |= same;
        }
        bool::from(found).then(|| self.all[index as usize].clone())
    }
}

/// The token of a header's value.
pub(super) fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, token) = value.split_at_checked(SCHEME.len())?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(SCHEME) && !token.is_empty()).then_some(token)
}
