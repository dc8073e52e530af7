// The collectives and messages of the NCCL of FakeGpus.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/support/fake_gpus_state.h"

namespace sirtaki::tests {
namespace {

using ops::cuda::StreamHandle;
using ops::nccl::CommHandle;
using ops::nccl::DataType;
using ops::nccl::RedOp;
using ops::nccl::Result;

using AllDo = std::function<void(const std::vector<FakePart>&)>;

std::string Counted(std::size_t count, DataType type) {
  return "count " + std::to_string(count) + " type " + std::to_string(static_cast<int>(type));
}
std::string Combined(std::size_t count, DataType type, RedOp op) {
  return Counted(count, type) + " op " + std::to_string(static_cast<int>(op));
}

// What NCCL takes another algorithm for.
std::string AlgorithmOf(const char* function, const FakeRanges& uses) {
  std::size_t bytes = 0;
  for (const FakeRange& range : uses) bytes = std::max(bytes, range.bytes);
  if (bytes <= std::size_t{64} << 10) return function;
  return std::string(function) + (bytes <= std::size_t{1} << 20 ? " of many" : " of very many");
}

// A collective: the last member to come does it for all.
Result Meet(FakeNcclCall& call, const char* function, const std::string& what, StreamHandle stream,
            FakePart part, FakeRanges uses, const AllDo& all) {
  const Result result = call.Begin(function, " " + what);
  if (result != Result::kSuccess) return result;
  FakeComm& comm = *call.comm;
  const std::uint64_t number = comm.calls++;
  // One kind of memory on all ranks.
  const std::string asked = std::string(function) + " " + what +
                            (comm.HasRegistered(part.input) ? " from registered memory" : "") +
                            (comm.HasRegistered(part.output) ? " to registered memory" : "");
  FakeLaunch launch;
  launch.stream = &call.s.StreamOf(stream);
  launch.algorithm = AlgorithmOf(function, uses);
  launch.uses = std::move(uses);
  launch.run = [number, asked, part, all](FakeComm& self) {
    FakeMeeting& meeting = self.group->meetings[number];
    if (meeting.parts.empty()) meeting.what = asked;
    if (meeting.what != asked) {
      FailAsMisuse("ranks differ: " + meeting.what + ", " + asked);  // they would hang, or worse
    }
    meeting.parts[self.rank] = part;
    if (!meeting.done && static_cast<int>(meeting.parts.size()) == self.size) {
      std::vector<FakePart> parts;
      parts.reserve(meeting.parts.size());
      for (const auto& [rank, of] : meeting.parts) parts.push_back(of);
      all(parts);
      meeting.done = true;
    }
    return meeting.done;
  };
  return call.Launch(std::move(launch));
}

void LogPath(FakeNcclCall& call, const void* input, const void* output, DataType type, RedOp op) {
  const FakeComm& comm = *call.comm;
  const bool in_window = comm.HasRegistered(input, true) && comm.HasRegistered(output, true);
  const bool registered = comm.HasRegistered(input) && comm.HasRegistered(output);
  const char* const path = PathOfAllReduce({.op = op,
                                            .type = type,
                                            .in_place = input == output,
                                            .in_window = in_window,
                                            .registered = registered,
                                            .nvls = call.s.windows == FakeGpus::Windows::kSymmetric,
                                            .hosts = call.s.hosts});
  call.s.Log("path of ncclAllReduce rank " + std::to_string(comm.rank) + ": " + path);
}

Result AllReduce(const void* input, void* output, std::size_t count, DataType type, RedOp op,
                 CommHandle comm, StreamHandle stream) {
  FakeNcclCall call(comm);
  const std::size_t bytes = count * FakeSizeOf(type);
  const bool in_place = input == output;
  if (!ClaimsFakeRanges({input, bytes}, {output, bytes}, in_place)) return Result::kInvalidUsage;
  LogPath(call, input, output, type, op);
  return Meet(call, "ncclAllReduce", Combined(count, type, op), stream, {input, output},
              {{input, bytes}, {output, bytes}}, [=](const std::vector<FakePart>& parts) {
                std::vector<void*> outputs;
                outputs.reserve(parts.size());
                for (const FakePart& part : parts) outputs.push_back(part.output);
                FakeReduce(op, type, parts, count, outputs);
              });
}

Result Reduce(const void* input, void* output, std::size_t count, DataType type, RedOp op, int root,
              CommHandle comm, StreamHandle stream) {
  FakeNcclCall call(comm);
  const std::size_t bytes = count * FakeSizeOf(type);
  const FakeRange written{output, call.comm->rank == root ? bytes : 0};
  if (!ClaimsFakeRanges({input, bytes}, written, input == output)) return Result::kInvalidUsage;
  return Meet(call, "ncclReduce", Combined(count, type, op) + " root " + std::to_string(root),
              stream, {input, output}, {{input, bytes}, written},
              [=](const std::vector<FakePart>& parts) {
                FakeReduce(op, type, parts, count, {parts[static_cast<std::size_t>(root)].output});
              });
}

Result Broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 CommHandle comm, StreamHandle stream) {
  FakeNcclCall call(comm);
  const std::size_t bytes = count * FakeSizeOf(type);
  const bool reads = call.comm->rank == root;
  const FakeRange read{input, reads ? bytes : 0};
  if (!ClaimsFakeRanges(read, {output, bytes}, input == output)) return Result::kInvalidUsage;
  return Meet(call, "ncclBroadcast", Counted(count, type) + " root " + std::to_string(root), stream,
              {input, output}, {read, {output, bytes}}, [=](const std::vector<FakePart>& parts) {
                for (const FakePart& part : parts) {
                  std::memmove(part.output, parts[static_cast<std::size_t>(root)].input, bytes);
                }
              });
}

Result AllGather(const void* input, void* output, std::size_t count, DataType type, CommHandle comm,
                 StreamHandle stream) {
  FakeNcclCall call(comm);
  const std::size_t bytes = count * FakeSizeOf(type);
  const auto ranks = static_cast<std::size_t>(call.comm->size);
  const auto place = static_cast<std::size_t>(call.comm->rank) * bytes;
  const bool in_place = input == static_cast<std::byte*>(output) + place;
  if (!ClaimsFakeRanges({input, bytes}, {output, ranks * bytes}, in_place)) {
    return Result::kInvalidUsage;
  }
  return Meet(call, "ncclAllGather", Counted(count, type), stream, {input, output},
              {{input, bytes}, {output, ranks * bytes}}, [=](const std::vector<FakePart>& parts) {
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
  FakeNcclCall call(comm);
  const std::size_t bytes = count * FakeSizeOf(type);
  const auto ranks = static_cast<std::size_t>(call.comm->size);
  const auto place = static_cast<std::size_t>(call.comm->rank) * bytes;
  const bool in_place = output == static_cast<const std::byte*>(input) + place;
  if (!ClaimsFakeRanges({input, ranks * bytes}, {output, bytes}, in_place)) {
    return Result::kInvalidUsage;
  }
  return Meet(
      call, "ncclReduceScatter", Combined(count, type, op), stream, {input, output},
      {{input, ranks * bytes}, {output, bytes}}, [=](const std::vector<FakePart>& parts) {
        for (std::size_t r = 0; r < parts.size(); ++r) {
          std::vector<FakePart> slices;
          slices.reserve(parts.size());
          for (const FakePart& part : parts) {
            slices.push_back({static_cast<const std::byte*>(part.input) + r * bytes, nullptr});
          }
          FakeReduce(op, type, slices, count, {parts[r].output});
        }
      });
}

Result Send(const void* input, std::size_t count, DataType type, int peer, CommHandle comm,
            StreamHandle stream) {
  FakeNcclCall call(comm);
  FakeStream& to = call.s.StreamOf(stream);
  const Result result = call.Begin(
      "ncclSend", " to " + std::to_string(peer) + " stream " + std::to_string(to.number));
  if (result != Result::kSuccess) return result;
  const std::size_t bytes = count * FakeSizeOf(type);
  if (!ClaimsFakeRanges({input, bytes}, {}, false)) return Result::kInvalidUsage;
  FakeLaunch launch;
  launch.stream = &to;
  launch.to = peer;
  launch.uses = {{input, bytes}};
  auto mail = std::make_shared<FakeMail>(FakeMail{.from = {input, bytes}});
  launch.run = [peer, mail = std::move(mail)](FakeComm& self) {
    if (!std::exchange(mail->is_sent, true)) {
      self.group->mail[{self.rank, peer}].push_back(mail);
      TheFakeGpus().has_sent = true;
    }
    return mail->is_taken;
  };
  return call.Launch(std::move(launch));
}

Result Recv(void* output, std::size_t count, DataType type, int peer, CommHandle comm,
            StreamHandle stream) {
  FakeNcclCall call(comm);
  const Result result = call.Begin("ncclRecv", " from " + std::to_string(peer));
  if (result != Result::kSuccess) return result;
  const std::size_t bytes = count * FakeSizeOf(type);
  if (!ClaimsFakeRanges({}, {output, bytes}, false)) return Result::kInvalidUsage;
  FakeLaunch launch;
  launch.stream = &call.s.StreamOf(stream);
  launch.from = peer;
  launch.uses = {{output, bytes}};
  launch.run = [peer, output, bytes](FakeComm& self) {
    auto& mail = self.group->mail[{peer, self.rank}];
    if (mail.empty()) return false;
    const FakeRange& from = mail.front()->from;
    if (from.bytes != bytes) FailAsMisuse("ncclRecv of another size than its ncclSend");
    if (bytes > 0) std::memcpy(output, from.begin, bytes);
    mail.front()->is_taken = true;
    mail.pop_front();
    return true;
  };
  return call.Launch(std::move(launch));
}

}  // namespace

void FillFakeCollectives(ops::nccl::Api* api) {
  api->AllReduce = AllReduce;
  api->Reduce = Reduce;
  api->Broadcast = Broadcast;
  api->AllGather = AllGather;
  api->ReduceScatter = ReduceScatter;
  api->Send = Send;
  api->Recv = Recv;
}

}  // namespace sirtaki::tests
