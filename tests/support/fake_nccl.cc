// The NCCL of FakeGpus.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <type_traits>

#include "tests/support/fake_gpus_state.h"
#include "tests/support/half_reference.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ops::nccl::CommHandle;
using ops::nccl::Config;
using ops::nccl::DataType;
using ops::nccl::RedOp;
using ops::nccl::Result;
using ops::nccl::UniqueId;

using Lock = std::lock_guard<std::mutex>;

// Memory that a call reads or writes.
struct FakeRange {
  const void* begin = nullptr;
  std::size_t bytes = 0;

  bool Overlaps(const FakeRange& other) const {
    const auto* a = static_cast<const std::byte*>(begin);
    const auto* b = static_cast<const std::byte*>(other.begin);
    const std::less<> before;
    return bytes > 0 && other.bytes > 0 && before(a, b + other.bytes) && before(b, a + bytes);
  }
};

// What a thread has called since it opened its group.
struct OpenGroup {
  struct Launch {
    CommHandle comm;
    std::function<void()> launch;
    bool sends;
  };
  int depth = 0;
  std::vector<Launch> launches;
  std::vector<FakeRange> read;
  std::vector<FakeRange> written;
};
thread_local OpenGroup open_group;

// A kernel may stand in front of an aborted one this long before it counts as stuck: another thread
// may abort its communicator, too.
constexpr auto kStuck = std::chrono::seconds(2);

Result BeginNccl(FakeGpus::State& s, const std::string& function, const std::string& rest = "") {
  s.Log(function + rest);
  int error = 0;
  return s.Fails(function, &error) ? static_cast<Result>(error) : Result::kSuccess;
}

// The calls of a group run together: what one of them writes is no other's. A collective has its
// input and its output from its rank alone, in place or not.
bool Claims(const FakeRange& read, const FakeRange& written) {
  if (open_group.depth == 0) return true;
  for (const FakeRange& other : open_group.written) {
    if (other.Overlaps(read) || other.Overlaps(written)) return false;
  }
  for (const FakeRange& other : open_group.read) {
    if (other.Overlaps(written)) return false;
  }
  open_group.read.push_back(read);
  open_group.written.push_back(written);
  return true;
}

std::string RankText(const FakeComm& comm) { return " rank " + std::to_string(comm.rank); }

// What was called is in its stream when it is no longer in progress.
Result Launch(FakeGpus::State& s, const std::shared_ptr<FakeComm>& comm,
              std::vector<std::function<void()>> launches) {
  comm->launch.insert(comm->launch.end(), launches.begin(), launches.end());
  comm->in_progress = s.answers;
  if (s.answers != 0) return Result::kInProgress;
  for (const auto& launch : comm->launch) launch();
  comm->launch.clear();
  return Result::kSuccess;
}

Result Call(FakeGpus::State& s, CommHandle handle, std::function<void()> launch,
            bool sends = false) {
  if (open_group.depth > 0) {
    open_group.launches.push_back({handle, std::move(launch), sends});
    return Result::kSuccess;
  }
  return Launch(s, s.comms.at(handle), {std::move(launch)});
}

// A collective: the last member to come does it for all.
Result Meet(const char* function, const std::string& what, CommHandle handle, StreamHandle stream,
            FakePart part, const std::function<void(const std::vector<FakePart>&)>& all) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const std::shared_ptr<FakeComm> comm = s.comms.at(handle);
  const Result result = BeginNccl(s, function, RankText(*comm) + " " + what);
  if (result != Result::kSuccess) return result;
  const std::uint64_t number = comm->calls++;
  // One kind of memory on all ranks.
  const std::string asked = std::string(function) + " " + what +
                            (comm->HasRegistered(part.input) ? " from registered memory" : "") +
                            (comm->HasRegistered(part.output) ? " to registered memory" : "");
  return Call(s, handle, [&s, comm, stream, number, asked, part, all] {
    s.StreamOf(stream).queue.emplace_back(
        [comm, number, asked, part, all] {
          if (comm->aborted) return true;
          FakeMeeting& meeting = comm->group->meetings[number];
          if (meeting.parts.empty()) meeting.what = asked;
          if (meeting.what != asked) std::abort();  // real ranks would hang, or worse
          meeting.parts[comm->rank] = part;
          if (!meeting.done && static_cast<int>(meeting.parts.size()) == comm->size) {
            std::vector<FakePart> parts;
            parts.reserve(meeting.parts.size());
            for (const auto& [rank, of] : meeting.parts) parts.push_back(of);
            all(parts);
            meeting.done = true;
          }
          return meeting.done;
        },
        comm.get());
  });
}

bool IsRank(CommHandle handle, int rank) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  return s.CommOf(handle).rank == rank;
}

std::size_t RanksOf(CommHandle handle) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  return static_cast<std::size_t>(s.CommOf(handle).size);
}

std::string Counted(std::size_t count, DataType type) {
  return "count " + std::to_string(count) + " type " + std::to_string(static_cast<int>(type));
}
std::string Combined(std::size_t count, DataType type, RedOp op) {
  return Counted(count, type) + " op " + std::to_string(static_cast<int>(op));
}

Result InitRank(CommHandle* handle, int size, UniqueId id, int rank, Config* config) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const Result result =
      BeginNccl(s, "ncclCommInitRankConfig",
                " rank " + std::to_string(rank) + " blocking " + std::to_string(config->blocking));
  if (result != Result::kSuccess) return result;
  auto comm = std::make_shared<FakeComm>();
  comm->rank = rank;
  comm->size = size;
  std::shared_ptr<FakeGroup>& group = s.groups[std::string(id.bytes.begin(), id.bytes.end())];
  if (group == nullptr) group = std::make_shared<FakeGroup>();
  group->size = size;
  group->ranks.insert(rank);
  comm->group = group;
  comm->in_progress = s.answers;
  *handle = reinterpret_cast<CommHandle>(comm.get());
  s.comms[*handle] = std::move(comm);
  return Result::kInProgress;
}

Result AsyncError(CommHandle handle, Result* error) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  int wanted = 0;
  if (s.Fails("ncclCommGetAsyncError", &wanted)) return static_cast<Result>(wanted);
  FakeComm& comm = *s.comms.at(handle);
  *error = Result::kSuccess;
  const auto set = s.async_errors.find(comm.rank);
  if (set != s.async_errors.end()) {
    *error = set->second;
  } else if (comm.in_progress != 0) {
    if (comm.in_progress > 0) --comm.in_progress;
    *error = Result::kInProgress;
  } else if (static_cast<int>(comm.group->ranks.size()) < comm.size || !comm.HasWindow(s.windows)) {
    *error = Result::kInProgress;
  } else {
    for (const auto& launch : comm.launch) launch();
    comm.launch.clear();
  }
  return Result::kSuccess;
}

// End takes the communicator away from its handle. The caller has the lock.
std::shared_ptr<FakeComm> End(FakeGpus::State& s, CommHandle handle) {
  const auto found = s.comms.find(handle);
  if (found == s.comms.end()) std::abort();  // twice
  std::shared_ptr<FakeComm> comm = std::move(found->second);
  comm->launch.clear();  // which hold it
  s.comms.erase(found);
  return comm;
}

Result Destroy(CommHandle handle) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  return BeginNccl(s, "ncclCommDestroy", RankText(*End(s, handle)));
}

// The caller has the lock. True: something of the communicator is still in a stream; `stuck`: behind
// a kernel of one that is not aborted.
bool IsInStreams(FakeGpus::State& s, const FakeComm& comm, bool* stuck) {
  bool found = false;
  const auto look = [&](const FakeStream& stream) {
    const bool here = std::any_of(stream.queue.begin(), stream.queue.end(),
                                  [&comm](const auto& one) { return one.comm == &comm; });
    if (!here) return;
    found = true;
    const FakeComm* const front = stream.queue.front().comm;
    if (front != nullptr && !front->aborted) *stuck = true;
  };
  for (const auto& [handle, stream] : s.streams) look(*stream);
  for (const auto& [device, stream] : s.default_streams) look(stream);
  return found;
}

// The devices go on until what was aborted has left them.
void AwaitAborted(FakeGpus::State& s, const FakeComm& comm) {
  const auto begun = std::chrono::steady_clock::now();
  {
    const Lock lock(s.mutex);
    ++s.aborting;
  }
  for (;;) {
    {
      const Lock lock(s.mutex);
      bool stuck = false;
      s.Run(/*held_too=*/true);
      if (!IsInStreams(s, comm, &stuck)) {
        --s.aborting;
        return;
      }
      if (stuck && std::chrono::steady_clock::now() - begun > kStuck) {
        std::fputs(
            "ncclCommAbort would deadlock: in front in the stream stands the kernel of a "
            "communicator that is not aborted\n",
            stderr);
        std::abort();
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Result Abort(CommHandle handle) {
  FakeGpus::State& s = TheFakeGpus();
  Result result = Result::kSuccess;
  std::shared_ptr<FakeComm> comm;
  {
    const Lock lock(s.mutex);
    comm = End(s, handle);
    result = BeginNccl(s, "ncclCommAbort", RankText(*comm));
    // The thread's device is chosen again afterwards: the first one if none was.
    s.contexts.insert(std::max(0, FakeCurrentDevice()));
    comm->aborted = true;
    for (auto& [number, meeting] : comm->group->meetings) {
      if (!meeting.done) meeting.parts.erase(comm->rank);
    }
    if (open_group.depth > 0) std::abort();  // what NCCL does then is not played here
  }
  AwaitAborted(s, *comm);
  return result;
}

Result EndGroup(FakeGpus::State& s) {
  const Lock lock(s.mutex);
  const Result result = BeginNccl(s, "ncclGroupEnd");
  if (--open_group.depth > 0) return result;
  auto launches = std::move(open_group.launches);
  open_group.launches.clear();
  open_group.read.clear();
  open_group.written.clear();
  if (result != Result::kSuccess) return result;
  Result worst = Result::kSuccess;
  // A group starts all of it together: what it receives waits for none of what it sends.
  for (const bool sends : {true, false}) {
    for (auto& of : launches) {
      if (of.sends != sends) continue;
      const Result one = Launch(s, s.comms.at(of.comm), {std::move(of.launch)});
      if (one != Result::kSuccess) worst = one;
    }
  }
  return worst;
}

Result GroupEnd() { return EndGroup(TheFakeGpus()); }

void LogPath(CommHandle handle, const void* input, const void* output, DataType type, RedOp op) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const FakeComm& comm = s.CommOf(handle);
  const bool in_window = comm.HasRegistered(input, true) && comm.HasRegistered(output, true);
  const bool registered = comm.HasRegistered(input) && comm.HasRegistered(output);
  const char* const path = PathOfAllReduce({.op = op,
                                            .type = type,
                                            .in_place = input == output,
                                            .in_window = in_window,
                                            .registered = registered,
                                            .nvls = s.windows,
                                            .hosts = s.hosts});
  s.Log("path of ncclAllReduce" + RankText(comm) + ": " + path);
}

Result AllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                 CommHandle comm, StreamHandle stream) {
  LogPath(comm, input, output, type, op);
  return Meet("ncclAllReduce", Combined(count, type, op), comm, stream, {input, output},
              [=](const std::vector<FakePart>& parts) {
                std::vector<void*> outputs;
                outputs.reserve(parts.size());
                for (const FakePart& part : parts) outputs.push_back(part.output);
                FakeReduce(op, type, parts, count, outputs);
              });
}

Result Reduce(const void* input, void* output, std::size_t count, DataType type, RedOp op, int root,
              CommHandle comm, StreamHandle stream) {
  return Meet("ncclReduce", Combined(count, type, op) + " root " + std::to_string(root), comm,
              stream, {input, output}, [=](const std::vector<FakePart>& parts) {
                FakeReduce(op, type, parts, count, {parts[static_cast<std::size_t>(root)].output});
              });
}

Result Broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 CommHandle comm, StreamHandle stream) {
  const std::size_t bytes = count * FakeSizeOf(type);
  const bool reads = IsRank(comm, root);
  if (!Claims({input, reads ? bytes : 0}, {output, bytes})) return Result::kInvalidUsage;
  return Meet("ncclBroadcast", Counted(count, type) + " root " + std::to_string(root), comm, stream,
              {input, output}, [=](const std::vector<FakePart>& parts) {
                for (const FakePart& part : parts) {
                  std::memmove(part.output, parts[static_cast<std::size_t>(root)].input, bytes);
                }
              });
}

Result AllGather(const void* input, void* output, std::size_t count, DataType type, CommHandle comm,
                 StreamHandle stream) {
  const std::size_t bytes = count * FakeSizeOf(type);
  const std::size_t ranks = RanksOf(comm);
  if (!Claims({input, bytes}, {output, ranks * bytes})) return Result::kInvalidUsage;
  return Meet("ncclAllGather", Counted(count, type), comm, stream, {input, output},
              [=](const std::vector<FakePart>& parts) {
                for (const FakePart& to : parts) {
                  for (std::size_t r = 0; r < parts.size(); ++r) {
                    std::memmove(static_cast<std::byte*>(to.output) + r * bytes, parts[r].input,
                                 bytes);
                  }
                }
              });
}

Result ReduceScatter(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                     CommHandle comm, StreamHandle stream) {
  return Meet("ncclReduceScatter", Combined(count, type, op), comm, stream, {input, output},
              [=](const std::vector<FakePart>& parts) {
                for (std::size_t r = 0; r < parts.size(); ++r) {
                  std::vector<FakePart> slices;
                  slices.reserve(parts.size());
                  for (const FakePart& part : parts) {
                    slices.push_back(
                        {static_cast<const std::byte*>(part.input) + r * count * FakeSizeOf(type),
                         nullptr});
                  }
                  FakeReduce(op, type, slices, count, {parts[r].output});
                }
              });
}

Result Send(const void* input, std::size_t count, DataType type, int peer, CommHandle handle,
            StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const std::shared_ptr<FakeComm> comm = s.comms.at(handle);
  const Result result = BeginNccl(s, "ncclSend",
                                  RankText(*comm) + " to " + std::to_string(peer) + " stream " +
                                      std::to_string(s.StreamOf(stream).number));
  if (result != Result::kSuccess) return result;
  const std::size_t bytes = count * FakeSizeOf(type);
  if (!Claims({input, bytes}, {})) return Result::kInvalidUsage;
  const auto launch = [&s, comm, stream, peer, input, bytes] {
    s.StreamOf(stream).queue.emplace_back(
        [comm, peer, input, bytes] {
          const auto* from = static_cast<const std::byte*>(input);
          comm->group->mail[{comm->rank, peer}].emplace_back(from, from + bytes);
          return true;
        },
        comm.get());
  };
  return Call(s, handle, launch, /*sends=*/true);
}

Result Recv(void* output, std::size_t count, DataType type, int peer, CommHandle handle,
            StreamHandle stream) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const std::shared_ptr<FakeComm> comm = s.comms.at(handle);
  const Result result = BeginNccl(s, "ncclRecv", RankText(*comm) + " from " + std::to_string(peer));
  if (result != Result::kSuccess) return result;
  const std::size_t bytes = count * FakeSizeOf(type);
  if (!Claims({}, {output, bytes})) return Result::kInvalidUsage;
  return Call(s, handle, [&s, comm, stream, peer, output, bytes] {
    s.StreamOf(stream).queue.emplace_back(
        [comm, peer, output, bytes] {
          if (comm->aborted) return true;
          auto& mail = comm->group->mail[{peer, comm->rank}];
          if (mail.empty()) return false;
          if (mail.front().size() != bytes) std::abort();
          if (bytes > 0) std::memcpy(output, mail.front().data(), bytes);
          mail.pop_front();
          return true;
        },
        comm.get());
  });
}

}  // namespace

// sym_kernels.cc:269, device.h:543 (ncclNvlsSupported), register/coll_reg.cc:48 and 184 of
// v2.28.9-1.
const char* PathOfAllReduce(const FakeAllReduce& call) {
  const bool is_half = call.type == DataType::kFloat16 || call.type == DataType::kBfloat16;
  const bool is_float = is_half || call.type == DataType::kFloat32;
  const bool is_sum =
      call.op == RedOp::kSum;  // an average of floats is a PreMulSum, of others a PostDiv
  if (call.in_window && call.hosts == 1 && is_sum && is_float) return "symmetric";
  const bool is_small = call.type == DataType::kInt8 || call.type == DataType::kUint8;
  const bool is_wide_float = call.type == DataType::kFloat32 || call.type == DataType::kFloat64;
  const bool is_least_or_most = call.op == RedOp::kMin || call.op == RedOp::kMax;
  if (call.nvls && !is_small && (is_sum || (is_least_or_most && !is_wide_float))) {
    return call.registered ? "nvls" : "nvls, copied";
  }
  return call.registered && !call.in_place ? "ring" : "ring, copied";
}

FakeComm& FakeGpus::State::CommOf(CommHandle handle) { return *comms.at(handle); }

void FillFakeNccl(ops::nccl::Api* api) {
  api->GetVersion = [](int* version) {
    *version = ops::nccl::kDeclaredVersion;
    return Result::kSuccess;
  };
  api->GetUniqueId = [](UniqueId* id) {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    const Result result = BeginNccl(s, "ncclGetUniqueId");
    const std::string text = "id " + std::to_string(s.next_number++);
    std::copy(text.begin(), text.end(), id->bytes.begin());
    return result;
  };
  api->CommInitRankConfig = InitRank;
  api->CommGetAsyncError = AsyncError;
  api->CommFinalize = [](CommHandle handle) {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    return BeginNccl(s, "ncclCommFinalize", RankText(*s.comms.at(handle)));
  };
  api->CommDestroy = Destroy;
  api->CommAbort = Abort;
  api->GetErrorString = [](Result result) {
    if (result == Result::kInvalidUsage) return "invalid usage";
    return result == Result::kRemoteError ? "remote process exited" : "a fake NCCL error";
  };
  api->GetLastError = [](CommHandle) {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    thread_local std::string text;  // read without the lock
    text = s.last_nccl_error;
    return text.c_str();
  };
  api->GroupStart = [] {
    FakeGpus::State& s = TheFakeGpus();
    const Lock lock(s.mutex);
    ++open_group.depth;
    return BeginNccl(s, "ncclGroupStart");
  };
  api->GroupEnd = GroupEnd;
  api->AllReduce = AllReduce;
  api->Reduce = Reduce;
  api->Broadcast = Broadcast;
  api->AllGather = AllGather;
  api->ReduceScatter = ReduceScatter;
  api->Send = Send;
  api->Recv = Recv;
  FillFakeRegistration(api);
  api->MemAlloc = [](void** memory, std::size_t bytes) {
    {
      FakeGpus::State& s = TheFakeGpus();
      const Lock lock(s.mutex);
      const Result result = BeginNccl(s, "ncclMemAlloc");
      if (result != Result::kSuccess) return result;
    }
    const ops::cuda::Error error = TheFakeGpus().cuda.Malloc(memory, bytes);
    return error == ops::cuda::Error::kSuccess ? Result::kSuccess : Result::kUnhandledCudaError;
  };
  api->MemFree = [](void* memory) {
    {
      FakeGpus::State& s = TheFakeGpus();
      const Lock lock(s.mutex);
      BeginNccl(s, "ncclMemFree");
    }
    TheFakeGpus().cuda.Free(memory);
    return Result::kSuccess;
  };
}

std::size_t FakeSizeOf(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kFloat32:
      return 4;
    case DataType::kInt64:
    case DataType::kFloat64:
      return 8;
  }
  std::abort();
}

namespace {

template <typename T>
T Combine(RedOp op, T a, T b) {
  if (op == RedOp::kMin) return std::min(a, b);
  if (op == RedOp::kMax) return std::max(a, b);
  if constexpr (std::is_floating_point_v<T>) {
    return op == RedOp::kProd ? a * b : a + b;
  } else {
    using Unsigned = std::make_unsigned_t<T>;
    const auto x = static_cast<std::uint64_t>(static_cast<Unsigned>(a));
    const auto y = static_cast<std::uint64_t>(static_cast<Unsigned>(b));
    return static_cast<T>(op == RedOp::kProd ? x * y : x + y);
  }
}

// `round`: to the type of the tensors, which each step ends in. For averages NCCL multiplies what
// each rank gives by 1/n, rounded to that type, before it adds; of integers it divides the sum.
template <typename T, typename Read, typename Round, typename Write>
void ReduceAs(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
              const std::vector<void*>& outputs, Read read, Round round, Write write) {
  const auto ranks = static_cast<T>(parts.size());
  const bool scales = op == RedOp::kAvg && std::is_floating_point_v<T>;
  const T share = scales ? round(1 / ranks) : 1;
  const auto given = [&](const FakePart& part, std::size_t i) {
    const T value = read(part.input, i);
    return scales ? round(value * share) : value;
  };
  for (std::size_t i = 0; i < count; ++i) {
    T value = given(parts.front(), i);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      value = round(Combine(op, value, given(parts[p], i)));
    }
    if (op == RedOp::kAvg && !scales) value = static_cast<T>(value / ranks);
    for (void* output : outputs) write(output, i, value);
  }
}

template <typename T>
void ReducePlain(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
                 const std::vector<void*>& outputs) {
  ReduceAs<T>(
      op, parts, count, outputs,
      [](const void* from, std::size_t i) { return static_cast<const T*>(from)[i]; },
      [](T value) { return value; },
      [](void* to, std::size_t i, T value) { static_cast<T*>(to)[i] = value; });
}

void ReduceHalf(const SmallFloat& format, RedOp op, const std::vector<FakePart>& parts,
                std::size_t count, const std::vector<void*>& outputs) {
  ReduceAs<float>(
      op, parts, count, outputs,
      [&](const void* from, std::size_t i) {
        return static_cast<float>(format.Decode(static_cast<const std::uint16_t*>(from)[i]));
      },
      [&](float value) {
        return static_cast<float>(format.Decode(format.Encode(static_cast<double>(value))));
      },
      [&](void* to, std::size_t i, float value) {
        static_cast<std::uint16_t*>(to)[i] = format.Encode(static_cast<double>(value));
      });
}

}  // namespace

void FakeReduce(RedOp op, DataType type, const std::vector<FakePart>& parts, std::size_t count,
                const std::vector<void*>& outputs) {
  switch (type) {
    case DataType::kInt8:
      return ReducePlain<std::int8_t>(op, parts, count, outputs);
    case DataType::kUint8:
      return ReducePlain<std::uint8_t>(op, parts, count, outputs);
    case DataType::kInt32:
      return ReducePlain<std::int32_t>(op, parts, count, outputs);
    case DataType::kInt64:
      return ReducePlain<std::int64_t>(op, parts, count, outputs);
    case DataType::kFloat32:
      return ReducePlain<float>(op, parts, count, outputs);
    case DataType::kFloat64:
      return ReducePlain<double>(op, parts, count, outputs);
    case DataType::kFloat16:
      return ReduceHalf(kFloat16, op, parts, count, outputs);
    case DataType::kBfloat16:
      return ReduceHalf(kBFloat16, op, parts, count, outputs);
  }
}

}  // namespace sirtaki::tests
