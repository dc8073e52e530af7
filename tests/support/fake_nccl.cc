// The NCCL of FakeGpus.
#include <algorithm>
#include <cmath>
#include <cstring>
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
    s.StreamOf(stream).queue.push_back([comm, number, asked, part, all] {
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
    });
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

Result End(const char* function, CommHandle handle, bool aborts) {
  FakeGpus::State& s = TheFakeGpus();
  const Lock lock(s.mutex);
  const auto found = s.comms.find(handle);
  if (found == s.comms.end()) std::abort();  // twice
  const Result result = BeginNccl(s, function, RankText(*found->second));
  if (aborts) found->second->aborted = true;
  found->second->launch.clear();  // which hold it
  s.comms.erase(found);
  return result;
}

Result GroupEnd() {
  FakeGpus::State& s = TheFakeGpus();
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

Result AllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                 CommHandle comm, StreamHandle stream) {
  return Meet("ncclAllReduce", Counted(count, type) + " op " + std::to_string(static_cast<int>(op)),
              comm, stream, {input, output}, [=](const std::vector<FakePart>& parts) {
                std::vector<void*> outputs;
                outputs.reserve(parts.size());
                for (const FakePart& part : parts) outputs.push_back(part.output);
                FakeReduce(op, type, parts, count, outputs);
              });
}

Result Reduce(const void* input, void* output, std::size_t count, DataType type, RedOp op, int root,
              CommHandle comm, StreamHandle stream) {
  return Meet("ncclReduce", Counted(count, type) + " root " + std::to_string(root), comm, stream,
              {input, output}, [=](const std::vector<FakePart>& parts) {
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
  return Meet("ncclReduceScatter", Counted(count, type), comm, stream, {input, output},
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
    s.StreamOf(stream).queue.push_back([comm, peer, input, bytes] {
      const auto* from = static_cast<const std::byte*>(input);
      comm->group->mail[{comm->rank, peer}].emplace_back(from, from + bytes);
      return true;
    });
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
    s.StreamOf(stream).queue.push_back([comm, peer, output, bytes] {
      if (comm->aborted) return true;
      auto& mail = comm->group->mail[{peer, comm->rank}];
      if (mail.empty()) return false;
      if (mail.front().size() != bytes) std::abort();
      if (bytes > 0) std::memcpy(output, mail.front().data(), bytes);
      mail.pop_front();
      return true;
    });
  });
}

}  // namespace

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
  api->CommDestroy = [](CommHandle handle) { return End("ncclCommDestroy", handle, false); };
  api->CommAbort = [](CommHandle handle) { return End("ncclCommAbort", handle, true); };
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

template <typename T, typename Read, typename Write>
void ReduceAs(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
              const std::vector<void*>& outputs, Read read, Write write) {
  for (std::size_t i = 0; i < count; ++i) {
    T value = read(parts.front().input, i);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      value = Combine(op, value, static_cast<T>(read(parts[p].input, i)));
    }
    if (op == RedOp::kAvg) value = static_cast<T>(value / static_cast<T>(parts.size()));
    for (void* output : outputs) write(output, i, value);
  }
}

template <typename T>
void ReducePlain(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
                 const std::vector<void*>& outputs) {
  ReduceAs<T>(
      op, parts, count, outputs,
      [](const void* from, std::size_t i) { return static_cast<const T*>(from)[i]; },
      [](void* to, std::size_t i, T value) { static_cast<T*>(to)[i] = value; });
}

void ReduceHalf(const SmallFloat& format, RedOp op, const std::vector<FakePart>& parts,
                std::size_t count, const std::vector<void*>& outputs) {
  ReduceAs<float>(
      op, parts, count, outputs,
      [&](const void* from, std::size_t i) {
        return static_cast<float>(format.Decode(static_cast<const std::uint16_t*>(from)[i]));
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
