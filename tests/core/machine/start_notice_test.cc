#include "core/machine/start_notice.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace sirtaki::core {
namespace {

TEST(StartNoticeTest, NoticesArriveInOrder) {
  std::string name;
  const int fd = ListenForStart(&name);
  ASSERT_GE(fd, 0);
  EnvironmentView env;
  env.Set(std::string(kStartNoticeVariable), name);
  TellStart(env, StartNotice::kBegins);
  TellStart(env, StartNotice::kIsThrough);
  char byte = 0;
  EXPECT_EQ(read(fd, &byte, 1), 1);
  EXPECT_EQ(byte, 'b');
  EXPECT_EQ(read(fd, &byte, 1), 1);
  EXPECT_EQ(byte, 't');
  EXPECT_EQ(read(fd, &byte, 1), -1);  // it does not block
  close(fd);
}

TEST(StartNoticeTest, NobodyNeedListen) {
  EnvironmentView env;
  TellStart(env, StartNotice::kBegins);
  env.Set(std::string(kStartNoticeVariable), "nobody");
  TellStart(env, StartNotice::kBegins);
  env.Set(std::string(kStartNoticeVariable), std::string(200, 'x'));
  TellStart(env, StartNotice::kBegins);
}

TEST(StartNoticeTest, EachListenerHasItsOwnName) {
  std::string one;
  std::string other;
  const int first = ListenForStart(&one);
  const int second = ListenForStart(&other);
  EXPECT_NE(one, other);
  close(first);
  close(second);
}

}  // namespace
}  // namespace sirtaki::core
