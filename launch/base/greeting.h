// How a rank's sirtakirun and the user's recognise each other before anything else is said or
// obeyed: each shows by an HMAC over fresh random challenges of both, and over the address that the
// rank has dialled, that it knows the run's key. The key itself never crosses the connection, what
// was recorded is of no use later, and what a stranger passes on from another address is refused.
//
//   rank                                sirtakirun
//   challenge                        ->
//                                    <- answer: its own challenge and its proof
//   proof                            ->
//                                    <- welcome
//
// A rank whose connection is closed before that begins again: of too many strangers at once
// sirtakirun drops the oldest, and a rank that has not proven itself yet may be among them.
//
// Messages afterwards are neither encrypted nor signed: who can change packets between two hosts
// can change that too.
#pragma once

#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"

namespace sirtaki::launch {

// The rank's side of one connection. Pure, except that the challenge is random.
class Caller {
 public:
  // `address`: "address:port", as dialled.
  Caller(std::string key, std::string address);
  // The frame to begin with; empty if the system gives no random numbers.
  std::string Opening() const;
  // The first message that comes. Sets `*reply` to the frame that ends the greeting. kProtocol: it
  // does not come from this run's sirtakirun.
  core::Status Take(const RankMessage& message, std::string* reply) const;

 private:
  std::string key_;
  std::string address_;
  std::string challenge_;
};

// sirtakirun's side of one connection.
class Doorkeeper {
 public:
  // `address`: this end's, "address:port", which the rank must have dialled.
  Doorkeeper(std::string key, std::string address);
  // A message of a connection that is not known yet. False: a stranger's, who learns nothing but
  // that. Else `*reply` is the frame to send, if there is one.
  bool Take(const RankMessage& message, std::string* reply);
  bool knows() const { return knows_; }  // the other end is a rank of this run

 private:
  std::string key_;
  std::string address_;
  std::string theirs_;  // challenges
  std::string ours_;
  bool knows_ = false;
};

// Connects to all of "address:port,…" at once and takes the first that knows the key and says
// welcome. kTimedOut, kBackend: none does, with the reason of each.
core::Status ConnectToAny(Loop* loop, std::string_view addresses, const std::string& key,
                          core::Duration timeout, Link* out);

// A key for a run, 128 bits as letters; empty if the system gives no random numbers.
std::string RandomKey();

}  // namespace sirtaki::launch
