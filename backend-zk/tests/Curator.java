import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Locks and unlocks a path with Curator, as it is told line by line: "try", "lock", "unlock". */
class Curator {
    public static void main(String[] args) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(args[0], new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, args[1]);
        var in = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        System.out.println("ready");
        for (String line; (line = in.readLine()) != null; ) {
            switch (line) {
                case "try" -> System.out.println(mutex.acquire(0, TimeUnit.SECONDS) ? "got" : "busy");
                case "lock" -> { mutex.acquire(); System.out.println("got"); }
                case "unlock" -> { mutex.release(); System.out.println("free"); }
            }
        }
        System.exit(0);
    }
}
