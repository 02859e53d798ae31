// SPDX-License-Identifier: Apache-2.0

//! Where bytes leave, and where most mischief happens to them.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::json;
use tokio::{sync::mpsc, time::sleep};

use super::{
    answer::{HungUp, Piece},
    mischief::{Fault, Mischief},
    wire::Encoding,
};

/// The body of one answer.
pub(super) struct Pump {
    out: mpsc::Sender<Piece>,
    pub(super) encoding: Encoding,
    mischief: Option<Mischief>,
    /// Events so far.
    sent: usize,
    /// An event kept back, to be sent after the next.
    held: Option<Bytes>,
}

/// The stream is over.
pub(super) struct Over;

impl Pump {
    pub(super) fn new(out: mpsc::Sender<Piece>, encoding: Encoding, mischief: Option<Mischief>) -> Pump {
        Pump { out, encoding, mischief, sent: 0, held: None }
    }

    /// Something is kept back, and should be sent if nothing else comes.
    pub(super) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// The client has gone.
    pub(super) async fn closed(&self) {
        self.out.closed().await;
    }

    /// Breaks now, if it is time to.
    pub(super) async fn break_if_due(&mut self) -> Result<(), Over> {
        let Some(Mischief::Break { after, with }) = &self.mischief else { return Ok(()) };
        if self.sent < *after {
            return Ok(());
        }
        let fault = with.clone();
        self.break_watch(fault).await?;
        Err(Over)
    }

    /// One event, encoded.
    pub(super) async fn event(&mut self, event: Bytes) -> Result<(), Over> {
        match (&self.mischief, self.held.take()) {
            (Some(Mischief::Twice), _) => {
                self.send(event.clone()).await?;
                self.send(event).await?;
            }
            (Some(Mischief::Swap), None) => self.held = Some(event),
            (_, held) => {
                self.send(event).await?;
                if let Some(held) = held {
                    self.send(held).await?;
                }
            }
        }
        self.sent += 1;
        self.break_if_due().await
    }

    /// A bookmark says that everything before it has been sent, so nothing is kept back.
    pub(super) async fn bookmark(&mut self, event: Bytes) -> Result<(), Over> {
        self.flush().await?;
        self.send(event).await?;
        self.sent += 1;
        self.break_if_due().await
    }

    pub(super) async fn flush(&mut self) -> Result<(), Over> {
        match self.held.take() {
            Some(held) => self.send(held).await,
            None => Ok(()),
        }
    }

    /// A whole list, as far as mischief lets it.
    pub(super) async fn send_list(&mut self, body: Bytes) -> Result<(), Over> {
        let Some(Mischief::Break { with, .. }) = self.mischief.clone() else {
            return self.send(body).await;
        };
        let half = body.slice(..body.len() / 2);
        match with {
            Fault::Garbage => self.send(noise()).await,
            Fault::Oversize => self.oversize_list().await,
            Fault::End | Fault::Truncate | Fault::Error(_) => self.send(half).await,
            Fault::Cut => {
                self.send(half).await?;
                self.cut().await
            }
            Fault::Stall => {
                self.send(half).await?;
                self.stall().await
            }
        }
    }

    pub(super) async fn send(&mut self, bytes: Bytes) -> Result<(), Over> {
        let Some(Mischief::Drip { bytes: size, pause }) = self.mischief else {
            return self.out.send(Ok(bytes)).await.map_err(|_| Over);
        };
        for piece in bytes.chunks(size.max(1)) {
            self.out.send(Ok(Bytes::copy_from_slice(piece))).await.map_err(|_| Over)?;
            sleep(pause).await;
        }
        Ok(())
    }

    async fn break_watch(&mut self, fault: Fault) -> Result<(), Over> {
        match fault {
            Fault::Cut => self.cut().await,
            Fault::End => Ok(()),
            Fault::Stall => self.stall().await,
            Fault::Truncate => {
                let event = self.encoding.event("ADDED", &noise());
                self.send(event.slice(..event.len() / 2)).await
            }
            Fault::Garbage => {
                let noise: Bytes =
                    noise().iter().map(|byte| if *byte == b'\n' { 0 } else { *byte }).collect();
                self.send(self.encoding.frame(&noise)).await?;
                self.stall().await
            }
            Fault::Oversize => self.oversize_watch().await,
            Fault::Error(refusal) => {
                let status = self.encoding.status(&refusal.status());
                self.send(self.encoding.event("ERROR", &status)).await
            }
        }
    }

    async fn cut(&mut self) -> Result<(), Over> {
        // What was sent before must have left: the server drops unsent bytes together with the connection.
        sleep(Duration::from_millis(30)).await;
        self.out.send(Err(HungUp)).await.map_err(|_| Over)
    }

    async fn stall(&mut self) -> Result<(), Over> {
        self.out.closed().await;
        Err(Over)
    }

    async fn oversize_watch(&mut self) -> Result<(), Over> {
        let start = match self.encoding {
            Encoding::Protobuf => Bytes::from_static(&[0x7f, 0xff, 0xff, 0xf0]),
            Encoding::Json => json_without_end(),
        };
        self.send(start).await?;
        self.send_endless().await
    }

    async fn oversize_list(&mut self) -> Result<(), Over> {
        let start = match self.encoding {
            // runtime.Unknown whose raw field says to be 2 GiB long.
            Encoding::Protobuf => {
                let mut start = BytesMut::from(&b"k8s\0\x12"[..]);
                start.put_slice(&[0xf0, 0xff, 0xff, 0xff, 0x07]);
                start.freeze()
            }
            Encoding::Json => json_without_end(),
        };
        self.send(start).await?;
        self.send_endless().await
    }

    /// Not quite without end: a client that takes all of it is wrong, but need not take the machine down.
    async fn send_endless(&mut self) -> Result<(), Over> {
        let chunk = Bytes::from(vec![b'a'; 64 * 1024]);
        for _ in 0..ENDLESS / chunk.len() {
            self.send(chunk.clone()).await?;
        }
        self.stall().await
    }
}

fn json_without_end() -> Bytes {
    let mut text = json!({"kind": "List", "items": [], "metadata": {"name": ""}}).to_string();
    text.truncate(text.len() - 3);
    text.into()
}

/// 4 KiB that are no message of ours, the same each time.
fn noise() -> Bytes {
    let mut state = 0x9e37_79b9_u32;
    (0..4096)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}

const ENDLESS: usize = 128 << 20;
