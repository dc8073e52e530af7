#include "launch/base/rank_messages.h"

#include <gtest/gtest.h>

#include <random>

namespace sirtaki::launch {
namespace {

std::vector<RankMessage> Examples() {
  return {HelloMessage{3, 8, 1, "host", 29500},
          OutputMessage{Stream::kError, std::string("a\0b\n", 4)},
          EndMessage{EndKind::kSignalled, 9, "", true},
          EndMessage{EndKind::kNotStarted, 2, "no such file"},
          GoMessage{"10.0.0.1", 29500, "0,2"},
          StopMessage{},
          WrittenMessage{kMaxUnwritten},
          InitMessage{true},
          InitMessage{false},
          FaultMessage{"timed out: \"w\""},
          FaultMessage{},
          ChallengeMessage{std::string(32, '\0')},
          AnswerMessage{std::string(32, '\1'), std::string(32, '\2')},
          ProofMessage{std::string(32, '\3')},
          WelcomeMessage{},
          SignalMessage{10}};
}

// All that comes of the bytes, given in pieces of this size.
std::vector<RankMessage> Read(const std::string& bytes, std::size_t piece, core::Status* status) {
  MessageReader reader;
  std::vector<RankMessage> messages;
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    reader.Append(std::string_view(bytes).substr(at, piece));
    std::optional<RankMessage> message;
    while ((*status = reader.Next(&message)).ok() && message) {
      messages.push_back(*message);
    }
  }
  return messages;
}

TEST(RankMessagesTest, WhatIsWrittenReadsBackHoweverItIsCut) {
  std::string bytes;
  for (const RankMessage& message : Examples()) bytes += Encode(message);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{3}, std::size_t{7}, bytes.size()}) {
    core::Status status;
    EXPECT_EQ(Read(bytes, piece, &status), Examples()) << piece;
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

TEST(RankMessagesTest, TheLargestOutputFits) {
  const RankMessage large = OutputMessage{Stream::kOutput, std::string(kMaxOutputBytes, 'x')};
  core::Status status;
  EXPECT_EQ(Read(Encode(large), 1 << 20, &status), std::vector<RankMessage>{large});
}

TEST(RankMessagesTest, AMessageThatIsLongerThanAllowedIsRefusedBeforeItIsThere) {
  const std::string frame = Encode(OutputMessage{Stream::kOutput, std::string(1000, 'x')});
  MessageReader reader(256);
  reader.Append(frame.substr(0, 4));
  std::optional<RankMessage> message;
  EXPECT_EQ(reader.Next(&message).code(), core::StatusCode::kProtocol);
}

TEST(RankMessagesTest, RefusesWhatNoPeerSends) {
  for (const std::string& bytes :
       {std::string("\x01\0\0\0\x06", 5), std::string("\0\0\0\0", 4), std::string("GET / HTTP/1.1"),
        std::string("\x03\0\0\0\x01\x02\0", 7), std::string("\x02\0\0\0\x04\x04", 6)}) {
    core::Status status;
    EXPECT_TRUE(Read(bytes, bytes.size(), &status).empty());
    EXPECT_EQ(status.code(), core::StatusCode::kProtocol) << status.ToString();
  }
}

TEST(RankMessagesTest, NothingIsReadBehindWhatIsBroken) {
  core::Status status;
  EXPECT_TRUE(Read(std::string("\0\0\0\0", 4) + Encode(StopMessage{}), 1, &status).empty());
  EXPECT_FALSE(status.ok());
}

TEST(RankMessagesTest, SurvivesAnyBytes) {
  std::mt19937 random(7);
  std::string whole;
  for (const RankMessage& message : Examples()) whole += Encode(message);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = whole;
    for (int i = 0; i < 3; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    core::Status status;
    EXPECT_LE(Read(bytes, 1 + random() % 64, &status).size(), whole.size());
  }
}

}  // namespace
}  // namespace sirtaki::launch
