"""The calls of the vertex: one frozen dataclass a call, one a reply.

These are the contract between the rules (`ftlayer.vertex.rules`), the service that carries them and its
clients. A call that changes the vertex travels in an envelope with (client, sequence); see
`Envelope`. Arrays are NumPy, ids are uint64, times are milliseconds, ``payload`` is an Arrow record
batch that the vertex does not look into.

Names:
  stream    what a source's records are filed under: ``"<query>/<source>"`` for a wrapped source,
            ``"ingest/<name>"`` for an ingest, ``"<job>/<source>"`` for a topology. A stream lives on one
            shard.
  query     the stable name of a wrapped query (it survives restarts)
  epoch     handed out by `OpenQuery`; calls of an older epoch are refused with `StaleOwnerError`
  owner     the run of a topology that a call is of, "" for no topology's: after `ClaimJob` by another run it is
            refused with `StaleOwnerError`
  offset    position in a stream's delivery log: the number of rows ever made deliverable before it
"""

from __future__ import annotations

from ftlayer.vertex.calls.batches import BatchBegun as BatchBegun
from ftlayer.vertex.calls.batches import BatchState as BatchState
from ftlayer.vertex.calls.batches import BeginBatch as BeginBatch
from ftlayer.vertex.calls.batches import Commit as Commit
from ftlayer.vertex.calls.batches import Committed as Committed
from ftlayer.vertex.calls.batches import Deliverable as Deliverable
from ftlayer.vertex.calls.batches import DeliverableUpTo as DeliverableUpTo
from ftlayer.vertex.calls.batches import EmittedRows as EmittedRows
from ftlayer.vertex.calls.batches import OpenQuery as OpenQuery
from ftlayer.vertex.calls.batches import QueryOpened as QueryOpened
from ftlayer.vertex.calls.batches import QueryStatus as QueryStatus
from ftlayer.vertex.calls.batches import QueryStatusCall as QueryStatusCall
from ftlayer.vertex.calls.batches import ReadDeliveries as ReadDeliveries
from ftlayer.vertex.calls.batches import Report as Report
from ftlayer.vertex.calls.batches import Reseal as Reseal
from ftlayer.vertex.calls.batches import Seal as Seal
from ftlayer.vertex.calls.batches import Sealed as Sealed
from ftlayer.vertex.calls.batches import SealedRows as SealedRows
from ftlayer.vertex.calls.common import I32 as I32
from ftlayer.vertex.calls.common import MAX_ROWS as MAX_ROWS
from ftlayer.vertex.calls.common import REPLAYS as REPLAYS
from ftlayer.vertex.calls.common import U64 as U64
from ftlayer.vertex.calls.common import Envelope as Envelope
from ftlayer.vertex.calls.common import EventIds as EventIds
from ftlayer.vertex.calls.common import Failure as Failure
from ftlayer.vertex.calls.common import RecordBatches as RecordBatches
from ftlayer.vertex.calls.common import Records as Records
from ftlayer.vertex.calls.common import RootRange as RootRange
from ftlayer.vertex.calls.common import RowRoots as RowRoots
from ftlayer.vertex.calls.common import StreamCircuit as StreamCircuit
from ftlayer.vertex.calls.common import StreamOptions as StreamOptions
from ftlayer.vertex.calls.jobs import ORDER_EXPIRES_MS as ORDER_EXPIRES_MS
from ftlayer.vertex.calls.jobs import Announced as Announced
from ftlayer.vertex.calls.jobs import AnnouncedJob as AnnouncedJob
from ftlayer.vertex.calls.jobs import AnnounceJob as AnnounceJob
from ftlayer.vertex.calls.jobs import AskJob as AskJob
from ftlayer.vertex.calls.jobs import AuditEntry as AuditEntry
from ftlayer.vertex.calls.jobs import AuditPage as AuditPage
from ftlayer.vertex.calls.jobs import BatchDetails as BatchDetails
from ftlayer.vertex.calls.jobs import CheckpointDetails as CheckpointDetails
from ftlayer.vertex.calls.jobs import CheckpointTotals as CheckpointTotals
from ftlayer.vertex.calls.jobs import EdgeDetails as EdgeDetails
from ftlayer.vertex.calls.jobs import GetHour as GetHour
from ftlayer.vertex.calls.jobs import GetJob as GetJob
from ftlayer.vertex.calls.jobs import HistogramDetails as HistogramDetails
from ftlayer.vertex.calls.jobs import Hour as Hour
from ftlayer.vertex.calls.jobs import Incident as Incident
from ftlayer.vertex.calls.jobs import JobDetails as JobDetails
from ftlayer.vertex.calls.jobs import JobKind as JobKind
from ftlayer.vertex.calls.jobs import JobList as JobList
from ftlayer.vertex.calls.jobs import JobOrder as JobOrder
from ftlayer.vertex.calls.jobs import JobPlan as JobPlan
from ftlayer.vertex.calls.jobs import ListAudit as ListAudit
from ftlayer.vertex.calls.jobs import ListJobs as ListJobs
from ftlayer.vertex.calls.jobs import OrderAction as OrderAction
from ftlayer.vertex.calls.jobs import OrderAnswer as OrderAnswer
from ftlayer.vertex.calls.jobs import OrderRecord as OrderRecord
from ftlayer.vertex.calls.jobs import OrderState as OrderState
from ftlayer.vertex.calls.jobs import PlanEdge as PlanEdge
from ftlayer.vertex.calls.jobs import PlanNode as PlanNode
from ftlayer.vertex.calls.jobs import SlotDetails as SlotDetails
from ftlayer.vertex.calls.jobs import SubtaskCheckpointDetails as SubtaskCheckpointDetails
from ftlayer.vertex.calls.jobs import SubtaskDetails as SubtaskDetails
from ftlayer.vertex.calls.operating import MAX_LETTERS as MAX_LETTERS
from ftlayer.vertex.calls.operating import MAX_PAGE as MAX_PAGE
from ftlayer.vertex.calls.operating import Attempt as Attempt
from ftlayer.vertex.calls.operating import Changed as Changed
from ftlayer.vertex.calls.operating import CircuitsReported as CircuitsReported
from ftlayer.vertex.calls.operating import Cursor as Cursor
from ftlayer.vertex.calls.operating import Explain as Explain
from ftlayer.vertex.calls.operating import Explained as Explained
from ftlayer.vertex.calls.operating import ForgetLetters as ForgetLetters
from ftlayer.vertex.calls.operating import GetCursor as GetCursor
from ftlayer.vertex.calls.operating import GetRequeued as GetRequeued
from ftlayer.vertex.calls.operating import KeepLetters as KeepLetters
from ftlayer.vertex.calls.operating import KeptLetter as KeptLetter
from ftlayer.vertex.calls.operating import LettersKept as LettersKept
from ftlayer.vertex.calls.operating import ListRecords as ListRecords
from ftlayer.vertex.calls.operating import OwedId as OwedId
from ftlayer.vertex.calls.operating import Purge as Purge
from ftlayer.vertex.calls.operating import PutCursor as PutCursor
from ftlayer.vertex.calls.operating import Readmitted as Readmitted
from ftlayer.vertex.calls.operating import RecordInfo as RecordInfo
from ftlayer.vertex.calls.operating import RecordList as RecordList
from ftlayer.vertex.calls.operating import ReportCircuits as ReportCircuits
from ftlayer.vertex.calls.operating import Requeue as Requeue
from ftlayer.vertex.calls.operating import RequeuedLetter as RequeuedLetter
from ftlayer.vertex.calls.operating import RequeuedLetters as RequeuedLetters
from ftlayer.vertex.calls.operating import ReturnLetters as ReturnLetters
from ftlayer.vertex.calls.operating import Stats as Stats
from ftlayer.vertex.calls.operating import StatsReply as StatsReply
from ftlayer.vertex.calls.ranges import AskRanges as AskRanges
from ftlayer.vertex.calls.ranges import HeldPartition as HeldPartition
from ftlayer.vertex.calls.ranges import NoteRange as NoteRange
from ftlayer.vertex.calls.ranges import OpenRange as OpenRange
from ftlayer.vertex.calls.ranges import RangeNoted as RangeNoted
from ftlayer.vertex.calls.ranges import RangesTold as RangesTold
from ftlayer.vertex.calls.ranges import Register as Register
from ftlayer.vertex.calls.ranges import Registered as Registered
from ftlayer.vertex.calls.ranges import RowRange as RowRange
from ftlayer.vertex.calls.ranges import RowsStored as RowsStored
from ftlayer.vertex.calls.ranges import StoreRows as StoreRows
from ftlayer.vertex.calls.ranges import TakenOver as TakenOver
from ftlayer.vertex.calls.ranges import TakeOver as TakeOver
from ftlayer.vertex.calls.ranges import WantedRows as WantedRows
from ftlayer.vertex.calls.records import MAX_EDITS as MAX_EDITS
from ftlayer.vertex.calls.records import MAX_EXAMINED as MAX_EXAMINED
from ftlayer.vertex.calls.records import MAX_KEYS as MAX_KEYS
from ftlayer.vertex.calls.records import MAX_PAGE_BYTES as MAX_PAGE_BYTES
from ftlayer.vertex.calls.records import MAX_SELECTED as MAX_SELECTED
from ftlayer.vertex.calls.records import DeadGroup as DeadGroup
from ftlayer.vertex.calls.records import DeadGroups as DeadGroups
from ftlayer.vertex.calls.records import Edit as Edit
from ftlayer.vertex.calls.records import EditAndRequeue as EditAndRequeue
from ftlayer.vertex.calls.records import GroupList as GroupList
from ftlayer.vertex.calls.records import ListStreams as ListStreams
from ftlayer.vertex.calls.records import RecordPage as RecordPage
from ftlayer.vertex.calls.records import SelectRecords as SelectRecords
from ftlayer.vertex.calls.records import StreamDetails as StreamDetails
from ftlayer.vertex.calls.records import StreamList as StreamList
from ftlayer.vertex.calls.streams import Accepted as Accepted
from ftlayer.vertex.calls.streams import ClaimJob as ClaimJob
from ftlayer.vertex.calls.streams import Fail as Fail
from ftlayer.vertex.calls.streams import Failed as Failed
from ftlayer.vertex.calls.streams import Ingest as Ingest
from ftlayer.vertex.calls.streams import JobClaimed as JobClaimed
from ftlayer.vertex.calls.streams import OpenStream as OpenStream
from ftlayer.vertex.calls.streams import Persist as Persist
from ftlayer.vertex.calls.streams import Recall as Recall
from ftlayer.vertex.calls.streams import Recalled as Recalled
from ftlayer.vertex.calls.streams import SourcePosition as SourcePosition
from ftlayer.vertex.calls.streams import StreamOpened as StreamOpened
from ftlayer.vertex.calls.streams import StreamStatus as StreamStatus
from ftlayer.vertex.calls.streams import StreamStatusCall as StreamStatusCall
from ftlayer.vertex.calls.streams import TakeReplays as TakeReplays
from ftlayer.vertex.calls.streams import Touch as Touch
from ftlayer.vertex.calls.streams import Touched as Touched
from ftlayer.vertex.calls.streams import Xor as Xor
from ftlayer.vertex.calls.streams import Xored as Xored

MutatingCall = (
    Persist
    | Ingest
    | Xor
    | Fail
    | Touch
    | Register
    | AskRanges
    | StoreRows
    | TakeOver
    | NoteRange
    | ClaimJob
    | OpenStream
    | TakeReplays
    | Recall
    | OpenQuery
    | BeginBatch
    | Seal
    | Reseal
    | Commit
    | Requeue
    | Purge
    | EditAndRequeue
    | PutCursor
    | Deliverable
    | ReportCircuits
    | AnnounceJob
    | AskJob
    | KeepLetters
    | ForgetLetters
    | Readmitted
    | ReturnLetters
)
ReadingCall = (
    ReadDeliveries
    | StreamStatusCall
    | QueryStatusCall
    | ListRecords
    | GetCursor
    | Explain
    | Stats
    | ListJobs
    | GetJob
    | ListStreams
    | SelectRecords
    | DeadGroups
    | ListAudit
    | GetHour
    | GetRequeued
)
Call = MutatingCall | ReadingCall

Reply = (
    Accepted
    | Xored
    | Failed
    | Touched
    | Registered
    | RangesTold
    | RowsStored
    | TakenOver
    | RangeNoted
    | JobClaimed
    | StreamOpened
    | RecordBatches
    | Recalled
    | StreamStatus
    | QueryOpened
    | DeliverableUpTo
    | BatchBegun
    | Sealed
    | Committed
    | QueryStatus
    | RecordList
    | Explained
    | Changed
    | Cursor
    | StatsReply
    | StreamList
    | RecordPage
    | GroupList
    | AuditPage
    | Hour
    | CircuitsReported
    | Announced
    | OrderRecord
    | JobList
    | AnnouncedJob
    | LettersKept
    | RequeuedLetters
)
