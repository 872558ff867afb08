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

from ftlayer.vertex.calls.batches import (
    BatchBegun,
    BatchState,
    BeginBatch,
    Commit,
    Committed,
    Deliverable,
    DeliverableUpTo,
    EmittedRows,
    OpenQuery,
    QueryOpened,
    QueryStatus,
    QueryStatusCall,
    ReadDeliveries,
    Report,
    Reseal,
    Seal,
    Sealed,
    SealedRows,
)
from ftlayer.vertex.calls.common import (
    I32,
    MAX_ROWS,
    REPLAYS,
    U64,
    Envelope,
    EventIds,
    Failure,
    RecordBatches,
    Records,
    RootRange,
    RowRoots,
    StreamCircuit,
    StreamOptions,
)
from ftlayer.vertex.calls.jobs import (
    ORDER_EXPIRES_MS,
    Announced,
    AnnouncedJob,
    AnnounceJob,
    AskJob,
    AuditEntry,
    AuditPage,
    BatchDetails,
    CheckpointDetails,
    CheckpointTotals,
    EdgeDetails,
    GetHour,
    GetJob,
    HistogramDetails,
    Hour,
    Incident,
    JobDetails,
    JobKind,
    JobList,
    JobOrder,
    JobPlan,
    ListAudit,
    ListJobs,
    OrderAction,
    OrderAnswer,
    OrderRecord,
    OrderState,
    PlanEdge,
    PlanNode,
    SlotDetails,
    SubtaskCheckpointDetails,
    SubtaskDetails,
)
from ftlayer.vertex.calls.letters import (
    MAX_LETTERS,
    ForgetLetters,
    GetRequeued,
    KeepLetters,
    KeptLetter,
    LettersKept,
    Readmitted,
    RequeuedLetter,
    RequeuedLetters,
    ReturnLetters,
)
from ftlayer.vertex.calls.operating import (
    MAX_PAGE,
    Attempt,
    Changed,
    CircuitsReported,
    Cursor,
    Explain,
    Explained,
    GetCursor,
    ListRecords,
    OwedId,
    Purge,
    PutCursor,
    RecordInfo,
    RecordList,
    ReportCircuits,
    Requeue,
    Stats,
    StatsReply,
)
from ftlayer.vertex.calls.ranges import (
    AskRanges,
    HeldPartition,
    NoteRange,
    OpenRange,
    RangeNoted,
    RangesTold,
    Register,
    Registered,
    RowRange,
    RowsStored,
    StoreRows,
    TakenOver,
    TakeOver,
    WantedRows,
)
from ftlayer.vertex.calls.records import (
    MAX_EDITS,
    MAX_EXAMINED,
    MAX_KEYS,
    MAX_PAGE_BYTES,
    MAX_SELECTED,
    DeadGroup,
    DeadGroups,
    Edit,
    EditAndRequeue,
    GroupList,
    ListStreams,
    RecordPage,
    SelectRecords,
    StreamDetails,
    StreamList,
)
from ftlayer.vertex.calls.streams import (
    ClaimJob,
    JobClaimed,
    OpenStream,
    Recall,
    Recalled,
    StreamOpened,
    StreamStatus,
    StreamStatusCall,
    TakeReplays,
)
from ftlayer.vertex.calls.tracking import (
    Accepted,
    Fail,
    Failed,
    Ingest,
    Persist,
    SourcePosition,
    Touch,
    Touched,
    Xor,
    Xored,
)

__all__ = [
    "I32",
    "MAX_EDITS",
    "MAX_EXAMINED",
    "MAX_KEYS",
    "MAX_LETTERS",
    "MAX_PAGE",
    "MAX_PAGE_BYTES",
    "MAX_ROWS",
    "MAX_SELECTED",
    "ORDER_EXPIRES_MS",
    "REPLAYS",
    "U64",
    "Accepted",
    "AnnounceJob",
    "Announced",
    "AnnouncedJob",
    "AskJob",
    "AskRanges",
    "Attempt",
    "AuditEntry",
    "AuditPage",
    "BatchBegun",
    "BatchDetails",
    "BatchState",
    "BeginBatch",
    "Call",
    "Changed",
    "CheckpointDetails",
    "CheckpointTotals",
    "CircuitsReported",
    "ClaimJob",
    "Commit",
    "Committed",
    "Cursor",
    "DeadGroup",
    "DeadGroups",
    "Deliverable",
    "DeliverableUpTo",
    "EdgeDetails",
    "Edit",
    "EditAndRequeue",
    "EmittedRows",
    "Envelope",
    "EventIds",
    "Explain",
    "Explained",
    "Fail",
    "Failed",
    "Failure",
    "ForgetLetters",
    "GetCursor",
    "GetHour",
    "GetJob",
    "GetRequeued",
    "GroupList",
    "HeldPartition",
    "HistogramDetails",
    "Hour",
    "Incident",
    "Ingest",
    "JobClaimed",
    "JobDetails",
    "JobKind",
    "JobList",
    "JobOrder",
    "JobPlan",
    "KeepLetters",
    "KeptLetter",
    "LettersKept",
    "ListAudit",
    "ListJobs",
    "ListRecords",
    "ListStreams",
    "MutatingCall",
    "NoteRange",
    "OpenQuery",
    "OpenRange",
    "OpenStream",
    "OrderAction",
    "OrderAnswer",
    "OrderRecord",
    "OrderState",
    "OwedId",
    "Persist",
    "PlanEdge",
    "PlanNode",
    "Purge",
    "PutCursor",
    "QueryOpened",
    "QueryStatus",
    "QueryStatusCall",
    "RangeNoted",
    "RangesTold",
    "ReadDeliveries",
    "ReadingCall",
    "Readmitted",
    "Recall",
    "Recalled",
    "RecordBatches",
    "RecordInfo",
    "RecordList",
    "RecordPage",
    "Records",
    "Register",
    "Registered",
    "Reply",
    "Report",
    "ReportCircuits",
    "Requeue",
    "RequeuedLetter",
    "RequeuedLetters",
    "Reseal",
    "ReturnLetters",
    "RootRange",
    "RowRange",
    "RowRoots",
    "RowsStored",
    "Seal",
    "Sealed",
    "SealedRows",
    "SelectRecords",
    "SlotDetails",
    "SourcePosition",
    "Stats",
    "StatsReply",
    "StoreRows",
    "StreamCircuit",
    "StreamDetails",
    "StreamList",
    "StreamOpened",
    "StreamOptions",
    "StreamStatus",
    "StreamStatusCall",
    "SubtaskCheckpointDetails",
    "SubtaskDetails",
    "TakeOver",
    "TakeReplays",
    "TakenOver",
    "Touch",
    "Touched",
    "WantedRows",
    "Xor",
    "Xored",
]

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
