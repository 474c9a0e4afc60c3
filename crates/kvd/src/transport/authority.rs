//! Clients of Unix sockets whose `:authority` is a path.
//!
//! gRPC's C core (Python, C++, Ruby, PHP), gRPC for Java and for Swift send the socket's path
//! there, plain or with `%2F`. HTTP/2's grammar has no such authority, so the server would reset
//! each request. Nothing here means anything by an authority: what is no name in it becomes `-`,
//! in place and at the same length, so that the compression of headers (RFC 7541) sees the same
//! sizes on both sides. Values that are Huffman-coded stay as they are.

use super::connection::PeerSocket;
use crate::access::ConnectionPeer;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// A client's Unix socket, read with authorities that HTTP/2 takes.
pub(super) struct NamedUnixStream {
    stream: UnixStream,
    mender: AuthorityMender,
}

impl NamedUnixStream {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, mender: AuthorityMender::new() }
    }
}

impl PeerSocket for NamedUnixStream {
    fn find_peer(&self) -> Arc<ConnectionPeer> {
        self.stream.find_peer()
    }
}

impl Connected for NamedUnixStream {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for NamedUnixStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.mender.mend_bytes(&mut buffer.filled_mut()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for NamedUnixStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

const PREFACE_BYTES: u32 = 24;
const FRAME_HEAD_BYTES: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: u32 = 5;
/// The index of `:authority` in the static table of header names.
const AUTHORITY_INDEX: u32 = 1;
/// gRPC's C core spells it out.
const AUTHORITY_NAME: &[u8] = b":authority";

/// Follows the bytes of an HTTP/2 client, however they are cut, and mends authorities in place.
struct AuthorityMender {
    place: StreamPlace,
    /// Goes on from HEADERS to its CONTINUATION frames.
    field: BlockField,
}

/// Where the next byte is.
enum StreamPlace {
    /// In bytes that stay as they are.
    Skipped {
        left: u32,
    },
    FrameHead {
        head: [u8; FRAME_HEAD_BYTES],
        filled: usize,
    },
    /// At the length of a frame's padding; `skipped` bytes follow it.
    PadLength {
        left: u32,
        skipped: u32,
        ends: bool,
    },
    /// In bytes of a frame before its header block.
    BeforeBlock {
        left: u32,
        skipped: u32,
        padding: u32,
        ends: bool,
    },
    Block {
        left: u32,
        padding: u32,
        ends: bool,
    },
}

/// Where the next byte of a header block is.
#[derive(Clone, Copy)]
enum BlockField {
    Begin,
    /// In a number that says nothing here.
    SkippedNumber,
    /// In the index of a name that is past the first few.
    NameNumber,
    Length {
        of: FieldText,
    },
    LongLength {
        of: FieldText,
        is_coded: bool,
        value: u32,
        shift: u32,
    },
    Bytes {
        of: FieldText,
        left: u32,
    },
    /// This is no header block that is known: bytes stay as they are until it ends.
    Unknown,
}

/// A string of a header field.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FieldText {
    /// The first bytes of it are those of `:authority`; `None` where one is another.
    Name {
        known: Option<usize>,
    },
    Value,
    /// The value of an authority, and the rest of one that is a path.
    Authority,
    PathAuthority,
}

impl AuthorityMender {
    fn new() -> Self {
        Self { place: StreamPlace::Skipped { left: PREFACE_BYTES }, field: BlockField::Begin }
    }

    fn mend_bytes(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let taken = match &mut self.place {
                StreamPlace::Skipped { left } => {
                    let taken = bytes.len().min(*left as usize);
                    *left -= taken as u32;
                    taken
                }
                _ => {
                    self.take_byte(&mut bytes[0]);
                    1
                }
            };
            bytes = &mut bytes[taken..];
            if matches!(self.place, StreamPlace::Skipped { left: 0 }) {
                self.place = StreamPlace::FrameHead { head: [0; FRAME_HEAD_BYTES], filled: 0 };
            }
        }
    }

    fn take_byte(&mut self, byte: &mut u8) {
        match &mut self.place {
            StreamPlace::Skipped { left } => *left -= 1,
            StreamPlace::FrameHead { head, filled } => {
                head[*filled] = *byte;
                *filled += 1;
                if *filled == FRAME_HEAD_BYTES {
                    let head = *head;
                    self.begin_frame(head);
                }
            }
            &mut StreamPlace::PadLength { left, skipped, ends } => {
                self.enter_block(left - 1, skipped, u32::from(*byte), ends);
            }
            &mut StreamPlace::BeforeBlock { left, skipped, padding, ends } => {
                self.enter_block(left - 1, skipped - 1, padding, ends);
            }
            &mut StreamPlace::Block { left, padding, ends } => {
                self.field.take_byte(byte);
                self.enter_block(left - 1, 0, padding, ends);
            }
        }
    }

    fn begin_frame(&mut self, head: [u8; FRAME_HEAD_BYTES]) {
        let left = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let (kind, flags) = (head[3], head[4]);
        let ends = flags & END_HEADERS != 0;
        match kind {
            HEADERS => {
                self.field = BlockField::Begin;
                let skipped = if flags & PRIORITY != 0 { PRIORITY_BYTES } else { 0 };
                if flags & PADDED != 0 && left > 0 {
                    self.place = StreamPlace::PadLength { left, skipped, ends };
                } else {
                    self.enter_block(left, skipped, 0, ends);
                }
            }
            CONTINUATION => self.enter_block(left, 0, 0, ends),
            _ => self.place = StreamPlace::Skipped { left },
        }
    }

    /// Goes on in a frame of which `left` bytes are to come, the last of them padding.
    fn enter_block(&mut self, left: u32, skipped: u32, padding: u32, ends: bool) {
        self.place = if left <= padding {
            if ends {
                self.field = BlockField::Begin;
            }
            StreamPlace::Skipped { left }
        } else if skipped > 0 {
            StreamPlace::BeforeBlock { left, skipped, padding, ends }
        } else {
            StreamPlace::Block { left, padding, ends }
        };
    }
}

impl BlockField {
    fn take_byte(&mut self, byte: &mut u8) {
        let is_last = *byte & 0x80 == 0;
        *self = match *self {
            Self::Begin => Self::begin_field(*byte),
            Self::SkippedNumber if is_last => Self::Begin,
            Self::NameNumber if is_last => Self::Length { of: FieldText::Value },
            Self::Length { of } => {
                let (is_coded, value) = (!is_last, u32::from(*byte & 0x7f));
                match value {
                    0x7f => Self::LongLength { of, is_coded, value, shift: 0 },
                    _ => Self::begin_text(of, is_coded, value),
                }
            }
            Self::LongLength { of, is_coded, value, shift } => {
                let added = u32::from(*byte & 0x7f).checked_shl(shift).unwrap_or(u32::MAX);
                let value = value.saturating_add(added);
                match is_last {
                    true => Self::begin_text(of, is_coded, value),
                    false => Self::LongLength { of, is_coded, value, shift: shift + 7 },
                }
            }
            Self::Bytes { of, left } => {
                let of = of.mend_byte(byte);
                Self::Bytes { of, left: left - 1 }.unless_ended()
            }
            same @ (Self::SkippedNumber | Self::NameNumber | Self::Unknown) => same,
        };
    }

    fn begin_field(byte: u8) -> Self {
        let with_name = |mask: u8| match u32::from(byte & mask) {
            0 => Self::Length { of: FieldText::Name { known: Some(0) } },
            AUTHORITY_INDEX => Self::Length { of: FieldText::Authority },
            index if index == u32::from(mask) => Self::NameNumber,
            _ => Self::Length { of: FieldText::Value },
        };
        let skipped = |mask: u8| match byte & mask == mask {
            true => Self::SkippedNumber,
            false => Self::Begin,
        };
        match byte.leading_zeros() {
            0 => skipped(0x7f),
            1 => with_name(0x3f),
            2 => skipped(0x1f),
            _ => with_name(0x0f),
        }
    }

    fn begin_text(of: FieldText, is_coded: bool, left: u32) -> Self {
        let of = match of {
            FieldText::Name { .. } if is_coded => FieldText::Name { known: None },
            FieldText::Authority if is_coded => FieldText::Value,
            of => of,
        };
        Self::Bytes { of, left }.unless_ended()
    }

    fn unless_ended(self) -> Self {
        match self {
            Self::Bytes { of: FieldText::Name { known }, left: 0 } => {
                let is_authority = known == Some(AUTHORITY_NAME.len());
                let of = if is_authority { FieldText::Authority } else { FieldText::Value };
                Self::Length { of }
            }
            Self::Bytes { left: 0, .. } => Self::Begin,
            // Longer than any frame: a peer that means no harm sends none.
            Self::Bytes { left, .. } if left > 1 << 24 => Self::Unknown,
            field => field,
        }
    }
}

impl FieldText {
    /// Mends a byte of it; what it is from there on.
    fn mend_byte(self, byte: &mut u8) -> Self {
        let of = match self {
            Self::Name { known } => {
                let known = known.filter(|at| AUTHORITY_NAME.get(*at) == Some(byte));
                return Self::Name { known: known.map(|at| at + 1) };
            }
            // A name has neither.
            Self::Authority if matches!(*byte, b'/' | b'%') => Self::PathAuthority,
            of => of,
        };
        if of == Self::PathAuthority && !matches!(*byte, b'.' | b'_' | b'~' | b'-') {
            *byte = if byte.is_ascii_alphanumeric() { *byte } else { b'-' };
        }
        of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        bytes.extend_from_slice(payload);
        bytes
    }

    fn text(value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        match value.len() {
            short @ 0..127 => bytes.push(short as u8),
            long => {
                bytes.push(127);
                let rest = long - 127;
                assert!(rest < 1 << 14);
                bytes.extend([(rest & 0x7f) as u8 | 0x80, (rest >> 7) as u8]);
            }
        }
        bytes.extend_from_slice(value);
        bytes
    }

    /// `:method POST`, `:path`, an authority, a header with a name of its own, one of a long index.
    /// The authority's name is by index or spelled out.
    fn block(authority: &[u8], is_spelled: bool) -> Vec<u8> {
        let mut bytes = vec![0x83, 0x44];
        bytes.extend(text(b"/kvd.v1.Kvd/Attend"));
        bytes.push(if is_spelled { 0x40 } else { 0x41 });
        bytes.extend(if is_spelled { text(b":authority") } else { Vec::new() });
        bytes.extend(text(authority));
        bytes.push(0x40);
        bytes.extend(text(b":authoritative"));
        bytes.extend(text(b"/a"));
        bytes.push(0x40);
        bytes.extend(text(b"kvd-namespace"));
        bytes.extend(text(b"a/b%2F"));
        bytes.extend([0x0f, 0x21]);
        bytes.extend(text(b"/x"));
        // A new size of the table, and an index of a long number.
        bytes.extend([0x3f, 0xe1, 0x1f, 0xff, 0x80, 0x01]);
        bytes
    }

    fn mended(bytes: &[u8], step: usize) -> Vec<u8> {
        let mut mender = AuthorityMender::new();
        let mut bytes = bytes.to_vec();
        for part in bytes.chunks_mut(step) {
            mender.mend_bytes(part);
        }
        bytes
    }

    /// A client with an authority: headers in one frame, data that looks like headers, and
    /// headers that are padded and have a priority, and headers that are cut within the authority.
    fn client_bytes(authority: &[u8]) -> Vec<u8> {
        let block = block(authority, false);
        let mut bytes = PREFACE.to_vec();
        bytes.extend(frame(4, 0, &[]));
        bytes.extend(frame(HEADERS, END_HEADERS, &block));
        bytes.extend(frame(0, 0, &self::block(b"/never/mended", false)));
        let mut padded = vec![3, 0, 0, 0, 0, 7];
        padded.extend(&block);
        padded.extend(*b"///");
        bytes.extend(frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &padded));
        let (first, rest) = block.split_at(26);
        bytes.extend(frame(HEADERS, 0, first));
        bytes.extend(frame(CONTINUATION, 0, &[]));
        bytes.extend(frame(CONTINUATION, END_HEADERS, rest));
        bytes.extend(frame(HEADERS, END_HEADERS, &self::block(authority, true)));
        bytes
    }

    #[test]
    fn paths_become_names_of_the_same_length() {
        let long = [b"/run/".as_slice(), &[b'd'; 300], b"/kvd.sock"].concat();
        let long_name = [b"-run-".as_slice(), &[b'd'; 300], b"-kvd.sock"].concat();
        for (path, name) in [
            (b"/run/kvd/a b:1.sock".as_slice(), b"-run-kvd-a-b-1.sock".as_slice()),
            (b"%2Frun%2Fkvd.sock", b"-2Frun-2Fkvd.sock"),
            (b"run%2Fkvd.sock", b"run-2Fkvd.sock"),
            (&long, &long_name),
        ] {
            let (sent, wanted) = (client_bytes(path), client_bytes(name));
            let authority: http::uri::Authority =
                std::str::from_utf8(name).unwrap().parse().unwrap();
            assert_eq!(authority.as_str().len(), path.len());
            for step in [1, 2, 7, 64, sent.len()] {
                assert!(mended(&sent, step) == wanted, "in steps of {step}");
            }
        }
    }

    #[test]
    fn all_else_stays_as_it_is() {
        for authority in
            [b"localhost".as_slice(), b"127.0.0.1:7070", b"[::1]:7070", b"", b"kvd.sock"]
        {
            let sent = client_bytes(authority);
            assert!(mended(&sent, 5) == sent);
        }
        // Huffman-coded: `www.example.com` of RFC 7541, C.4.1.
        let coded = b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff";
        let sent = [PREFACE, &frame(HEADERS, END_HEADERS, coded)].concat();
        assert!(mended(&sent, 3) == sent);
    }

    #[test]
    fn bytes_of_no_protocol_are_passed_on() {
        let mut bytes = PREFACE.to_vec();
        let mut state = 1u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bytes.push((state >> 24) as u8 & if state & 0x100 == 0 { 0xff } else { 0x0f });
        }
        assert_eq!(mended(&bytes, 1), mended(&bytes, 4096));
        // Numbers without an end, and paddings that are longer than their frames.
        let endless = frame(HEADERS, END_HEADERS, &[[0x41, 0x7f].as_slice(), &[0xff; 40]].concat());
        let padded = frame(HEADERS, END_HEADERS | PADDED, &[9, 0x41, 1, b'/']);
        let sent = [PREFACE, &endless, &padded, &frame(HEADERS, 0, &block(b"/a", true))].concat();
        let wanted = [PREFACE, &endless, &padded, &frame(HEADERS, 0, &block(b"-a", true))].concat();
        assert!(mended(&sent, 1) == wanted);
    }
}
